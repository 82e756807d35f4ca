"""`start`: what it creates, what it refuses, and that it may be called again."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

import adapter
from adapter import Conflict, Invalid, NotFound, State, Unauthorized, Unsupported
from tests import adapters, jobs
from tests.adapters import World
from tests.cluster.api import Object
from tests.cluster.cluster import Cluster


def test_a_started_job_is_there_and_has_no_pods_before_it_is_opened(world: World) -> None:
    handle = world.started()
    assert world.trainjob(handle)["spec"]["suspend"] is True
    assert world.namespace.get("JobSet", handle.name)["spec"]["suspend"] is True
    assert world.namespace.pods() == []
    assert world.backend.inspect(handle).state is State.GATED
    world.backend.open(handle)
    world.running(handle)
    assert world.state(handle, State.RUNNING).admission == 1


def test_the_handle_is_that_of_the_object(world: World) -> None:
    spec = world.spec()
    handle = world.backend.start(spec)
    assert handle == adapter.Handle(
        world.namespace.name, f"dj-{spec.job}-s1", world.trainjob(handle)["metadata"]["uid"]
    )


def test_starting_again_gives_the_same_handle_at_every_stage(world: World) -> None:
    spec = world.spec()
    handle = world.backend.start(spec)
    assert world.backend.start(spec) == handle
    world.backend.open(handle)
    assert world.backend.start(spec) == handle
    world.running(handle)
    assert world.backend.start(spec) == handle
    world.end(handle)
    assert world.backend.start(spec) == handle
    assert len(world.namespace.list("TrainJob")) == 1


def test_another_spec_under_the_same_name_is_a_conflict(world: World) -> None:
    spec = world.spec()
    handle = world.backend.start(spec)
    with pytest.raises(Conflict) as error:
        world.backend.start(world.spec(job=spec.job, nodes=3))
    text = str(error.value)
    assert text.startswith(f"dispatch: conflict: TrainJob {world.namespace.name}/{handle.name}: it exists with another")
    assert "take submission 2" in text


def test_a_foreign_object_of_that_name_is_a_conflict(plain: World) -> None:
    spec = plain.spec()
    made = adapter.render(spec, {}, adapter.Settings.load(plain.settings))
    del made["metadata"]["annotations"], made["spec"]["runtimePatches"]
    plain.namespace.create(made)
    with pytest.raises(Conflict, match="it exists with another spec"):
        plain.backend.start(spec)
    assert plain.namespace.get("TrainJob", made["metadata"]["name"])


def test_the_runtime_may_be_gone_when_starting_again(world: World) -> None:
    jobs.own_runtime(world.namespace)
    spec = world.spec(runtime={"kind": "TrainingRuntime", "name": "own"})
    handle = world.backend.start(spec)
    world.namespace.delete("TrainingRuntime", "own")
    assert world.backend.start(spec) == handle


def test_the_pods_see_the_five_variables(world: World) -> None:
    spec = world.spec()
    handle = world.backend.start(spec)
    world.backend.open(handle)
    for pod in world.running(handle):
        (container,) = pod["spec"]["containers"]
        seen = {variable["name"]: resolved(pod, variable) for variable in container["env"]}
        assert {name: value for name, value in seen.items() if name.startswith("DISPATCH_")} == {
            "DISPATCH_JOB": spec.job,
            "DISPATCH_SUBMISSION": "1",
            "DISPATCH_ADMISSION": "1",
            "DISPATCH_EPOCH": "1000001",
            "DISPATCH_RESTART": "0",
        }
        assert seen["CHECKPOINTS"] == "/checkpoints"


def test_every_field_of_a_spec_reaches_the_pods(kueue: World) -> None:
    fields: dict[str, Any] = {
        "image": "registry.example/other:v2",
        "args": ["$(DISPATCH_EPOCH)"],
        "env": {"A": "b"},
        "nodes": 1,
        "procsPerNode": 3,
        "resources": {"requests": {"cpu": "100m"}, "limits": {"memory": "1Gi"}},
        "priority": "high",
        "nodeSelector": {"kubernetes.io/hostname": "kwok-1"},
        "labels": {"app.kubernetes.io/name": "x"},
    }
    handle = kueue.backend.start(kueue.spec(**fields))
    kueue.backend.open(handle)
    (pod,) = kueue.running(handle, 1)
    (container,) = pod["spec"]["containers"]
    assert (container["image"], container["args"]) == ("registry.example/other:v2", ["$(DISPATCH_EPOCH)"])
    assert container["resources"]["requests"]["cpu"] == "100m"
    assert {v["name"]: v.get("value") for v in container["env"]}["PET_NPROC_PER_NODE"] == "3"
    assert pod["spec"]["nodeName"] == "kwok-1"
    assert pod["metadata"]["labels"]["app.kubernetes.io/name"] == "x"
    assert kueue.namespace.get("JobSet", handle.name)["metadata"]["labels"]["app.kubernetes.io/name"] == "x"
    assert kueue.namespace.workload(handle.name)["spec"]["priorityClassRef"]["name"] == "high"
    assert kueue.trainjob(handle)["spec"]["activeDeadlineSeconds"] == 86400


def test_the_example_queue_admits_the_example_job(kueue: World) -> None:
    name, check = kueue.namespace.name, str(kueue.namespace.check)
    text = (adapters.EXAMPLES / "queue.yaml").read_text().replace("dispatch-admission", check)
    for obj in yaml.safe_load_all(
        text.replace("namespace: team-a", f"namespace: {name}").replace("name: lq", "name: own")
    ):
        if obj["kind"] == "ClusterQueue":
            obj["metadata"]["name"] = f"{name}-own"
        if obj["kind"] == "LocalQueue":
            obj["spec"]["clusterQueue"] = f"{name}-own"
        kueue.cluster.apply(obj)
    backend = kueue.connect(kueue={**kueue.settings["kueue"], "localQueue": "own"})
    handle = backend.start(kueue.spec())
    backend.open(handle)
    kueue.running(handle)
    assert backend.inspect(handle).admission == 1
    backend.stop(handle)
    kueue.cluster.delete("ClusterQueue", f"{name}-own")


# --- only what was asked for


def test_a_local_queue_named_default_takes_a_plain_job_and_start_takes_it_back(plain: World) -> None:
    version = "kueue.x-k8s.io/v1beta2"
    queue = {"apiVersion": version, "kind": "LocalQueue", "metadata": {"name": "default"}}
    plain.namespace.create({**queue, "spec": {"clusterQueue": plain.namespace.cluster_queue}})

    def captured() -> bool:
        made = adapter.render(plain.spec(), {}, adapter.Settings.load(plain.settings))
        return "kueue.x-k8s.io/queue-name" in plain.namespace.create(made, dry_run=True)["metadata"]["labels"]

    plain.wait(captured, "Kueue knows the LocalQueue")
    with pytest.raises(Unsupported) as error:
        plain.backend.start(plain.spec())
    assert "kueue.x-k8s.io/queue-name default" in str(error.value)
    assert "rename that LocalQueue" in str(error.value)
    assert str(error.value).endswith("It was removed again")
    assert [found for found in plain.left() if not found.startswith("Workload")] == []
    plain.wait(lambda: plain.left() == [], "Kueue lets its Workload go")


def test_a_captured_job_that_a_crash_left_behind_is_taken_back_by_the_next_start(plain: World) -> None:
    spec = plain.spec()
    made = adapter.render(spec, {}, adapter.Settings.load(plain.settings))
    made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "default"
    plain.namespace.create(made)
    with pytest.raises(Unsupported, match="It was removed again"):
        plain.backend.start(spec)
    plain.wait(lambda: plain.left() == [], "it is gone")


DROP_GATE = '[JSONPatch{op: "remove", path: "/metadata/annotations/kueue.x-k8s.io~1admission-gated-by"}]'
UNSUSPEND = '[JSONPatch{op: "replace", path: "/spec/suspend", value: false}]'
OTHER_QUEUE = '[JSONPatch{op: "replace", path: "/metadata/labels/kueue.x-k8s.io~1queue-name", value: "other"}]'


@pytest.mark.parametrize(
    ("mode", "patch", "fault"),
    [
        ("kueue", DROP_GATE, "it came back without its gate kueue.x-k8s.io/admission-gated-by"),
        ("plain", DROP_GATE, "it came back without its gate kueue.x-k8s.io/admission-gated-by"),
        ("plain", UNSUSPEND, "it came back unsuspended"),
        ("kueue", OTHER_QUEUE, "it came back with kueue.x-k8s.io/queue-name other instead of lq"),
    ],
)
def test_a_job_that_somebody_changes_on_its_way_is_removed_again(
    cluster: Cluster, mode: str, patch: str, fault: str
) -> None:
    with adapters.world(cluster, mode) as world, adapters.mutating_policy(cluster, world.namespace.name, patch):
        spec = world.spec()

        def changed() -> bool:
            made = adapter.render(spec, {}, adapter.Settings.load(world.settings))
            return bool(adapter.answer_fault(made, world.namespace.create(made, dry_run=True)))

        world.wait(changed, "the policy works")
        with pytest.raises(Unsupported) as error:
            world.backend.start(spec)
        assert fault in str(error.value)
        assert str(error.value).endswith("It was removed again")
        assert world.left(spec.job) == []


def test_without_that_check_a_job_runs_that_nobody_opened(
    cluster: Cluster, plain: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "answer_fault", lambda *_: "")
    with adapters.mutating_policy(cluster, plain.namespace.name, UNSUSPEND):
        made = adapter.render(plain.spec(), {}, adapter.Settings.load(plain.settings))
        plain.wait(lambda: not plain.namespace.create(made, dry_run=True)["spec"]["suspend"], "the policy works")
        plain.running(plain.backend.start(plain.spec()))


def test_in_a_namespace_that_kueue_does_not_see_a_job_is_refused_and_never_runs(cluster: Cluster) -> None:
    """The webhook that suspends is not asked: the job must not run meanwhile."""
    with adapters.world(cluster, "kueue") as world:
        (hook,) = (h for h in cluster.list("MutatingWebhookConfiguration") if "kueue" in h["metadata"]["name"])
        label = {"matchLabels": {"kueue-managed": "true"}}
        try:
            for number, one in enumerate(hook["webhooks"]):
                if "trainjob" in one["name"]:
                    hook["webhooks"][number] = {**one, "namespaceSelector": label}
            cluster.update(hook)
            spec = world.spec()

            def unseen() -> bool:
                made = adapter.render(spec, {}, adapter.Settings.load(world.settings))
                return len(world.namespace.create(made, dry_run=True)["spec"]["runtimePatches"]) == 1

            world.wait(unseen, "the webhook is not asked")
            with pytest.raises(Unsupported, match="Kueue's webhook did not see it"):
                world.backend.start(spec)
            assert world.left(spec.job) == []
        finally:
            current = cluster.get("MutatingWebhookConfiguration", hook["metadata"]["name"])
            for one in current["webhooks"]:
                one["namespaceSelector"] = {}
            cluster.update(current)
            world.wait(lambda: not unseen(), "the webhook is asked again")


# --- runtimes


def test_a_runtime_of_the_namespace_works_too(world: World) -> None:
    jobs.own_runtime(world.namespace)
    world.opened(runtime={"kind": "TrainingRuntime", "name": "own"}, nodes=2)


def test_a_runtime_that_does_not_exist_is_unsupported(world: World) -> None:
    spec = world.spec(runtime={"name": "nowhere"})
    with pytest.raises(Unsupported) as error:
        world.backend.start(spec)
    what = f"TrainJob {world.namespace.name}/{spec.name}"
    assert str(error.value) == (
        f"dispatch: unsupported: ClusterTrainingRuntime nowhere cannot run {what}: there is none of that name"
    )
    assert world.left() == []


def test_a_runtime_that_deletes_its_jobset_after_the_end_is_unsupported(plain: World) -> None:
    jobs.own_runtime(plain.namespace, ttlSecondsAfterFinished=60)
    with pytest.raises(
        Unsupported, match=r"TrainingRuntime own cannot run .*: its JobSet sets ttlSecondsAfterFinished"
    ):
        plain.backend.start(plain.spec(runtime={"kind": "TrainingRuntime", "name": "own"}))


# --- submissions


def test_the_next_submission_waits_for_the_end_of_the_one_before(world: World) -> None:
    spec = world.spec()
    first = world.backend.start(spec)
    second = world.spec(job=spec.job, submission=2)
    with pytest.raises(Conflict, match=f"TrainJob {first.name} has not ended: wait for its end, or stop"):
        world.backend.start(second)
    world.backend.open(first)
    world.running(first)
    with pytest.raises(Conflict, match="has not ended"):
        world.backend.start(second)
    world.end(first, code=1)
    handle = world.backend.start(second)
    assert world.backend.start(second) == handle
    assert world.backend.inspect(handle).epoch == 2_000_001 - (world.mode == "kueue")
    assert world.backend.find(spec.job) == (first, handle)


def test_the_next_submission_waits_for_pods_whose_trainjob_is_gone(world: World) -> None:
    first = world.opened()
    pod, _ = world.running(first)
    world.cluster.pods.stick(pod)
    world.namespace.delete("TrainJob", first.name)
    world.wait(lambda: len(world.namespace.pods(first.name)) == 1, "one pod is stuck")
    world.wait(lambda: not world.namespace.find("JobSet", first.name), "the JobSet is gone")
    second = world.spec(job=first.job, submission=2)
    with pytest.raises(Conflict, match=f"pod {pod['metadata']['name']} on {pod['spec']['nodeName']} has not ended"):
        world.backend.start(second)
    world.cluster.pods.unstick(pod)
    world.wait(lambda: world.namespace.pods(first.name) == [], "it is gone")
    assert world.backend.start(second).submission == 2


def test_without_that_guard_two_submissions_run_side_by_side(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    first = world.opened(resources={"requests": {"cpu": "500m"}})
    monkeypatch.setattr(adapter, "may_still_run", lambda *_: "")
    second = world.opened(job=first.job, submission=2, resources={"requests": {"cpu": "500m"}})
    living = {pod["metadata"]["annotations"]["dispatch.phpboyscout.uk/epoch"] for pod in world.namespace.pods()}
    assert living == {"1000001", "2000001"}
    assert len(world.running(first)) == len(world.running(second)) == 2


def test_a_submission_below_one_that_exists_is_a_conflict(world: World) -> None:
    spec = world.spec(submission=3)
    world.backend.start(spec)
    with pytest.raises(Conflict, match="submission 3 of its job exists already: take 4"):
        world.backend.start(world.spec(job=spec.job, submission=2))


@pytest.mark.parametrize("off", [False, True], ids=["guarded", "unguarded"])
def test_of_two_submissions_that_are_started_at_once_one_is(
    world: World, monkeypatch: pytest.MonkeyPatch, off: bool
) -> None:
    """The other one is started just when this one has found nothing in its way."""
    create, overlap = adapter.create_trainjob, adapter.Backend._overlap
    other = world.spec(submission=3)
    ours = world.spec(job=other.job, submission=2)

    def after_the_other(api: Any, trainjob: Any) -> Any:
        monkeypatch.setattr(adapter, "create_trainjob", create)
        world.backend.start(other)
        return create(api, trainjob)

    monkeypatch.setattr(adapter, "create_trainjob", after_the_other)
    if off:
        monkeypatch.setattr(
            adapter.Backend, "_overlap", lambda b, spec, *, created=False: "" if created else overlap(b, spec)
        )
        world.backend.start(ours)
        assert {handle.submission for handle in world.backend.find(ours.job)} == {2, 3}
        return
    with pytest.raises(Conflict, match=r"submission 3 of its job exists already: take 4. It was removed again"):
        world.backend.start(ours)
    assert [handle.submission for handle in world.backend.find(ours.job)] == [3]


def test_an_orphaned_jobset_may_still_run(plain: World) -> None:
    first = plain.opened()
    plain.namespace.delete("TrainJob", first.name, propagation="Orphan")
    plain.wait(lambda: not plain.namespace.find("TrainJob", first.name), "the TrainJob is gone")
    with pytest.raises(Conflict, match="has not ended"):
        plain.backend.start(plain.spec(job=first.job, submission=2))
    plain.backend.stop_job(first.job)
    assert plain.left(first.job) == []
    assert plain.backend.start(plain.spec(job=first.job, submission=2))


# --- refusals of the cluster


def test_a_priority_needs_kueue(plain: World) -> None:
    with pytest.raises(Unsupported, match="priority high needs Kueue: add a kueue section"):
        plain.backend.start(plain.spec(priority="high"))


def test_a_missing_permission_is_named(cluster: Cluster, plain: World) -> None:
    powerless = cluster.token_kubeconfig(plain.namespace.name, "powerless")
    backend = plain.connect(kubeconfig=str(powerless))
    with pytest.raises(Unauthorized) as error:
        backend.start(plain.spec())
    assert str(error.value).startswith("dispatch: unauthorized: ClusterTrainingRuntime torch-safe, for TrainJob ")
    assert 'cannot get resource "clustertrainingruntimes"' in str(error.value)


def test_credentials_that_the_server_does_not_know_are_unauthorized(cluster: Cluster, plain: World) -> None:
    file = cluster.folder / "config" / f"{plain.namespace.name}.wrong.kubeconfig"
    cluster.components.write_kubeconfig(file, "no-such-token", plain.namespace.name)
    with pytest.raises(Unauthorized, match="does not accept the credentials: renew them"):
        plain.connect(kubeconfig=str(file)).list()


def test_a_namespace_that_does_not_exist_is_not_found(cluster: Cluster, plain: World) -> None:
    backend = plain.connect(namespace="nowhere", kubeconfig=str(cluster.kubeconfig))
    with pytest.raises(NotFound, match='namespaces "nowhere" not found'):
        backend.start(plain.spec())


def test_what_a_webhook_refuses_is_invalid_with_its_words(plain: World) -> None:
    with pytest.raises(Invalid, match=r"the cluster refuses it: admission webhook .* denied the request"):
        plain.backend.start(plain.spec(runtime={"name": "torch-distributed"}, command=["tune", "run"]))


# --- economy


def test_start_and_open_make_four_calls(world: World) -> None:
    mark = world.cluster.audit_mark()
    spec = world.spec()
    handle = world.backend.start(spec)
    world.settled(handle)
    world.backend.open(handle)
    calls = [(e["verb"], e["objectRef"]["resource"]) for e in world.cluster.audit_events(world.user, since=mark)]
    assert calls == [
        ("get", "clustertrainingruntimes"),
        ("create", "trainjobs"),
        ("get", "trainjobs"),
        ("update", "trainjobs"),
    ]


def test_find_and_inspect_ask_for_nothing_of_other_jobs(world: World) -> None:
    handle, other = world.started(), world.started()
    mark = world.cluster.audit_mark()
    assert world.backend.find(handle.job) == (handle,)
    world.backend.inspect(handle)
    for event in world.cluster.audit_events(world.user, since=mark):
        if event["verb"] == "list":
            assert handle.job in event["requestURI"] or handle.uid in event["requestURI"]
        else:
            assert event["objectRef"]["name"] == handle.name
    assert set(world.backend.list()) == {handle, other}


def test_find_and_list_skip_probes(world: World) -> None:
    handle = world.started()
    label = {"dispatch.phpboyscout.uk/probe": "true"}
    world.namespace.patch("TrainJob", handle.name, {"metadata": {"labels": label}})
    assert world.backend.find(handle.job) == world.backend.list() == ()


def resolved(pod: Object, variable: Object) -> str:
    """A variable's value as the kubelet would give it."""
    if "value" in variable:
        return str(variable["value"])
    path = variable["valueFrom"]["fieldRef"]["fieldPath"]
    place, _, key = path.removesuffix("']").partition("['")
    return str(pod["metadata"][place.removeprefix("metadata.")].get(key, ""))
