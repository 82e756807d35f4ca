"""The test cluster itself: what the other tests take for granted."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.cluster import local, supervisor
from tests.cluster.api import Api, ApiError, Object
from tests.cluster.cluster import Cluster, ComponentDied
from tests.cluster.components import NAMES
from tests.cluster.namespaces import Namespace
from tests.cluster.waiting import WaitTimeout, unique, wait

ROOT = pathlib.Path(__file__).resolve().parents[2]
READ_PODS = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]}]


def pod(name: str, node: str | None = None, annotations: dict[str, str] | None = None) -> Object:
    """A pod that tolerates everything: it stays where it is when its node goes."""
    spec: Object = {
        "containers": [{"name": "main", "image": "none"}],
        "tolerations": [{"operator": "Exists"}],
        "terminationGracePeriodSeconds": 1,
    }
    if node:
        spec["nodeName"] = node
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": annotations or {}},
        "spec": spec,
    }


def batch_job(name: str, cpu: str = "1") -> Object:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": {"kueue.x-k8s.io/queue-name": "lq"}},
        "spec": {
            "suspend": True,
            "backoffLimit": 0,
            "template": {
                "spec": {
                    "restartPolicy": "Never",
                    "containers": [
                        {"name": "main", "image": "none", "resources": {"requests": {"cpu": cpu, "memory": "1Mi"}}}
                    ],
                }
            },
        },
    }


def running(cluster: Cluster, namespace: Namespace, name: str) -> Object:
    """The pod, once it runs."""

    def look() -> Object | None:
        found = namespace.get("Pod", name)
        return found if found["status"]["phase"] == "Running" else None

    return cluster.wait(look, f"pod {name} runs")


def gone(namespace: Namespace, kind: str, name: str) -> bool:
    return namespace.find(kind, name) is None


# --- pods


def test_a_pod_runs_until_a_test_ends_it(cluster: Cluster, namespace: Namespace) -> None:
    for name in ("good", "bad", "greedy"):
        namespace.create(pod(name))
    good, bad, greedy = (running(cluster, namespace, name) for name in ("good", "bad", "greedy"))

    cluster.pods.succeed(good)
    cluster.pods.fail(bad, 3)
    cluster.pods.oom(greedy)

    seen = {}
    for found in namespace.pods():
        ended = found["status"]["containerStatuses"][0]["state"]["terminated"]
        seen[found["metadata"]["name"]] = (found["status"]["phase"], ended["exitCode"], ended["reason"])
    assert seen == {
        "good": ("Succeeded", 0, "Completed"),
        "bad": ("Failed", 3, "Error"),
        "greedy": ("Failed", 137, "OOMKilled"),
    }


def test_a_stuck_pod_stays_terminating_until_it_is_unstuck(cluster: Cluster, namespace: Namespace) -> None:
    namespace.create(pod("stuck", annotations={"dispatch.test/stuck": "true"}))
    namespace.create(pod("free"))
    stuck = running(cluster, namespace, "stuck")
    running(cluster, namespace, "free")

    namespace.delete("Pod", "stuck")
    namespace.delete("Pod", "free")
    # Both were asked to go in this order, and kwok took the second: it has left the first alone.
    cluster.wait(lambda: gone(namespace, "Pod", "free"), "the free pod goes")
    assert "deletionTimestamp" in namespace.get("Pod", "stuck")["metadata"]

    cluster.pods.unstick(stuck)
    cluster.wait(lambda: gone(namespace, "Pod", "stuck"), "the unstuck pod goes")


def test_pod_logs_come_through_the_api_server(cluster: Cluster, namespace: Namespace) -> None:
    namespace.create(pod("talker"))
    talker = running(cluster, namespace, "talker")
    assert cluster.pods.read_log(talker) == ""

    cluster.pods.log(talker, "epoch 1000001\nstep 1")
    assert cluster.pods.read_log(talker) == "epoch 1000001\nstep 1\n"

    path = f"/api/v1/namespaces/{namespace.name}/pods/talker/log"
    lines = cluster.api.follow(path, query={"follow": "true"})
    assert [next(lines), next(lines)] == ["epoch 1000001", "step 1"]
    cluster.pods.log(talker, "step 2")
    assert next(lines) == "step 2"
    lines.close()  # type: ignore[attr-defined]  # it is a generator


# --- users and the audit log


def test_a_service_account_may_do_what_its_role_says_and_the_audit_log_tells(
    cluster: Cluster, namespace: Namespace
) -> None:
    api = Api(cluster.token_kubeconfig(namespace.name, "reader"))
    user = f"system:serviceaccount:{namespace.name}:reader"
    mark = cluster.audit_mark()
    with pytest.raises(ApiError) as refused:
        api.list("Pod", namespace.name)
    assert refused.value.status == 403
    assert cluster.audit(user, since=mark) == {("list", "", "pods", "")}

    cluster.grant(namespace.name, "reader", READ_PODS, inside=namespace.name)
    cluster.wait(lambda: api.list("Pod", namespace.name) == [], "the role is in force")
    mark = cluster.audit_mark()
    assert api.find("Pod", "nobody", namespace.name) is None
    with pytest.raises(ApiError):
        api.list("Pod", "default")
    assert [event["verb"] for event in cluster.audit_events(user, since=mark)] == ["get", "list"]
    api.close()


# --- the stack


def test_a_job_that_exceeds_the_quota_waits_for_the_first_to_end(cluster: Cluster) -> None:
    with cluster.namespace("1", check=False) as namespace:
        namespace.create(batch_job("first"))
        cluster.wait(lambda: len(namespace.pods()) == 1, "the first job's pod")
        namespace.create(batch_job("second"))
        waits = cluster.wait(lambda: condition(namespace.workload("second"), "QuotaReserved"), "the second is queued")
        assert waits["status"] == "False"
        (first,) = namespace.pods()
        cluster.pods.succeed(running(cluster, namespace, first["metadata"]["name"]))
        cluster.wait(
            lambda: (condition(namespace.workload("second"), "Admitted") or {}).get("status") == "True",
            "the second is admitted",
        )


def test_kueue_can_be_reconfigured_for_one_test(cluster: Cluster) -> None:
    frameworks = {"integrations": {"frameworks": ["batch/job"]}, "manageJobsWithoutQueueName": True}
    with cluster.namespace(check=False) as namespace:
        job = batch_job("queueless")
        del job["metadata"]["labels"]
        job["spec"]["suspend"] = False
        with cluster.reconfigured("kueue", config=frameworks):
            assert namespace.create(job, dry_run=True)["spec"]["suspend"] is True
        assert namespace.create(job, dry_run=True)["spec"]["suspend"] is False


def test_the_api_server_keeps_everything_over_a_kill(cluster: Cluster, namespace: Namespace) -> None:
    namespace.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "kept"}, "data": {"a": "b"}})
    before = namespace.get("ConfigMap", "kept")
    cluster.kill("kube-apiserver")
    try:
        with pytest.raises(WaitTimeout):
            wait(lambda: namespace.get("ConfigMap", "kept"), "a dead server answers", timeout=0.3)
    finally:
        cluster.start("kube-apiserver")
    assert namespace.get("ConfigMap", "kept") == before
    # The controllers have survived it: a pod is still scheduled and run.
    namespace.create(pod("after"))
    running(cluster, namespace, "after")


def test_a_paused_api_server_keeps_the_connection_and_answers_later(cluster: Cluster, namespace: Namespace) -> None:
    answers: list[object] = []
    cluster.pause("kube-apiserver")
    try:
        caller = threading.Thread(target=lambda: answers.append(namespace.find("ConfigMap", "none")))
        caller.start()
        caller.join(0.5)
        assert caller.is_alive()
    finally:
        cluster.resume("kube-apiserver")
    caller.join(20)
    assert answers == [None]


# --- nodes


@pytest.fixture
def node(cluster: Cluster) -> Iterator[str]:
    name = f"kwok-test-{unique()}"
    cluster.nodes.create(name)
    yield name
    cluster.delete("Node", name, missing_ok=True)


def test_a_lost_node_keeps_its_deleted_pod_until_it_is_back(cluster: Cluster, namespace: Namespace, node: str) -> None:
    namespace.create(pod("there", node))
    running(cluster, namespace, "there")

    cluster.nodes.lose(node)
    assert cluster.nodes.condition(node, "Ready") == "Unknown"
    namespace.delete("Pod", "there")
    namespace.create(pod("elsewhere", "kwok-0"))
    running(cluster, namespace, "elsewhere")
    namespace.delete("Pod", "elsewhere")
    cluster.wait(lambda: gone(namespace, "Pod", "elsewhere"), "a pod of another node goes")
    assert "deletionTimestamp" in namespace.get("Pod", "there")["metadata"]

    cluster.nodes.recover(node)
    cluster.wait(lambda: gone(namespace, "Pod", "there"), "the deleted pod goes")


def test_a_taint_can_be_put_on_a_node_and_taken_off(cluster: Cluster, node: str) -> None:
    cluster.nodes.taint(node, "dispatch.test/mine", "a")
    assert cluster.nodes.taints(node) == {"dispatch.test/mine"}
    cluster.nodes.untaint(node, "dispatch.test/mine")
    assert cluster.nodes.taints(node) == set()


# --- processes: each of these has a cluster or a supervisor of its own


def command_line(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.cluster", *arguments],
        cwd=ROOT,
        env={**os.environ, **changes},
        capture_output=True,
        text=True,
        timeout=200,
    )


def processes_of(folder: pathlib.Path) -> list[int]:
    """Every process that names this folder, in its arguments or its environment, and is no zombie."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if os.fsencode(folder) in text and supervisor.start_time(int(entry.name)) is not None:
            found.append(int(entry.name))
    return found


def test_up_list_down_from_the_command_line(tmp_path: pathlib.Path) -> None:
    # Longer than the 107 bytes of a socket's address, and with spaces.
    folder = tmp_path / ("a folder with a long name " * 4).strip() / "cluster"
    up = command_line("up", str(folder))
    try:
        assert up.returncode == 0, up.stderr
        assert f"export KUBECONFIG={folder}/admin.kubeconfig" in up.stdout
        assert Api(folder / "admin.kubeconfig").get("ClusterTrainingRuntime", "torch-distributed")

        listed = command_line("list", str(folder)).stdout
        assert sorted(line.split()[0] for line in listed.splitlines()[1:]) == sorted(NAMES)
        again = command_line("up", str(folder))
        assert again.returncode == 1
        assert "a cluster runs in" in again.stderr

        # A component that dies is noticed, and named with its log.
        attached = local.attach(folder)
        jobset = next(process for process in attached.status() if process.name == "jobset")
        os.kill(jobset.pid, signal.SIGKILL)
        with pytest.raises(ComponentDied, match="jobset ended with exit code -9"):
            attached.wait(lambda: False, "nothing", timeout=20)
    finally:
        down = command_line("down", str(folder))
    assert down.returncode == 0, down.stderr
    assert processes_of(folder) == []
    assert [path.name for path in folder.iterdir()] == ["logs"]
    assert command_line("down", str(folder)).returncode == 0
    assert command_line("list", str(folder)).returncode == 1


def test_a_failed_start_names_the_component_and_leaves_nothing(tmp_path: pathlib.Path) -> None:
    bogus, source = tmp_path / "kueue", tmp_path / "source"
    bogus.write_text("#!/bin/sh\necho this is no Kueue >&2\nexit 7\n")
    bogus.chmod(0o755)
    for part in ("crd/bases/a.yaml", "webhook/manifests.yaml"):
        (source / "config/components" / part).parent.mkdir(parents=True)
        (source / "config/components" / part).touch()
    folder = tmp_path / "cluster"
    up = command_line("up", str(folder), DISPATCH_TEST_KUEUE_BIN=str(bogus), DISPATCH_TEST_KUEUE_SRC=str(source))
    assert up.returncode == 1
    assert "kueue ended with exit code 7" in up.stderr
    assert "this is no Kueue" in up.stderr
    assert "Traceback" not in up.stderr
    assert processes_of(folder) == []
    assert [path.name for path in folder.iterdir()] == ["logs"]


def test_another_kueue_needs_both_variables(tmp_path: pathlib.Path) -> None:
    without = dict.fromkeys((local.KUEUE_BINARY, local.KUEUE_SOURCE), "")
    up = command_line("up", str(tmp_path / "c"), **{**without, local.KUEUE_BINARY: "/bin/true"})
    assert up.returncode == 1
    assert "$DISPATCH_TEST_KUEUE_BIN is set, $DISPATCH_TEST_KUEUE_SRC is not" in up.stderr


def test_without_go_and_with_an_empty_cache_the_error_says_what_to_install(tmp_path: pathlib.Path) -> None:
    up = command_line("up", str(tmp_path / "c"), PATH="/nowhere", XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert up.returncode == 1
    assert "Go is not installed" in up.stderr
    assert "install Go 1.26 or newer" in up.stderr
    assert "Traceback" not in up.stderr


def test_nothing_is_removed_from_a_folder_that_is_no_clusters(tmp_path: pathlib.Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "etcd").write_text("mine")
    assert command_line("up", str(tmp_path)).returncode == 1
    assert command_line("down", str(tmp_path)).returncode == 0
    assert (tmp_path / "etcd").read_text() == "mine"


OWNER = """
import pathlib, sys
from tests.cluster import private_etc
from tests.cluster.supervisor import Processes

folder = pathlib.Path(sys.argv[1])
processes = Processes.launch(folder)
private_etc.fill(folder / "etc")
wrapper = [sys.executable, "-m", "tests.cluster.private_etc", str(folder / "etc")]
processes.start("plain", ["/bin/sleep", "1000"])
processes.start("with-a-private-etc", [*wrapper, "/bin/sh", "-c", "cat /etc/hosts; exec sleep 1000"])
print("started", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner(tmp_path: pathlib.Path) -> Iterator[tuple[subprocess.Popen[str], pathlib.Path]]:
    """A process that owns a supervisor with two children, and the supervisor's folder."""
    folder = tmp_path / "owned"
    argv = [sys.executable, "-c", OWNER, str(folder)]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as popen:
        try:
            assert popen.stdout
            assert popen.stdout.readline() == "started\n"
            yield popen, folder
        finally:
            popen.kill()
    supervisor.shutdown(folder)


@pytest.mark.parametrize("victim", ["owner", "supervisor"])
def test_nothing_is_left_when_the_owner_or_the_supervisor_is_killed(
    victim: str, owner: tuple[subprocess.Popen[str], pathlib.Path]
) -> None:
    popen, folder = owner
    hosts = folder / "logs/with-a-private-etc.log"
    wait(lambda: hosts.read_text() == "127.0.0.1 localhost\n", "the second child sees its own /etc", timeout=20)
    state = json.loads((folder / supervisor.STATE).read_text())
    pids = [state["pid"], *(pid for pid, _ in state["children"])]
    assert len(pids) == 3
    assert all(map(supervisor.start_time, pids))

    os.kill(popen.pid if victim == "owner" else state["pid"], signal.SIGKILL)
    wait(lambda: not any(map(supervisor.start_time, pids)), "they are gone", timeout=20)


def condition(obj: Object, kind: str) -> Object | None:
    """An object's condition."""
    conditions = obj.get("status", {}).get("conditions", [])
    return next((c for c in conditions if c["type"] == kind), None)
