"""The providers of a test cluster beside the local one. kind itself is not run here: what leads to it is."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest
import yaml

from tests import jobs
from tests.cluster import existing, folder, kind, local, providers, stages
from tests.cluster.api import Api, Object
from tests.cluster.cluster import Cluster, Unsupported
from tests.cluster.components import KUBELET_CLIENT, PORTS, Components, token_kubeconfig
from tests.cluster.namespaces import Namespace
from tests.cluster.remote import Controls, Remote
from tests.cluster.supervisor import Processes
from tests.cluster.waiting import unique

ROOT = pathlib.Path(__file__).resolve().parents[2]
KIND_NAME = "dispatch-0123abcd"


def programs(at: pathlib.Path, **scripts: str) -> str:
    """A PATH on which only these programs are: each notes its arguments in `<name>.calls`, then runs its script."""
    at.mkdir(exist_ok=True)
    for name, script in scripts.items():
        (at / name).write_text(f'#!/bin/sh\necho "$@" >>"{at}/{name}.calls"\n{script}\n')
        (at / name).chmod(0o755)
    return str(at)


def calls(at: pathlib.Path, name: str) -> list[str]:
    """The arguments of each call of such a program."""
    file = at / f"{name}.calls"
    return file.read_text().splitlines() if file.exists() else []


def command_line(*arguments: str, path: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "tests.cluster", *arguments]
    return subprocess.run(argv, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True)


# --- which one it is


@pytest.mark.parametrize(
    ("named", "variable", "there", "chosen", "started"),
    [
        (None, "", (), "local", "local"),
        (None, "", ("docker", "kind", "go"), "local", "local"),
        (None, "", ("docker",), "local", "local"),
        (None, "", ("docker", "kind"), "kind", "kind"),
        (None, "/a/kubeconfig", ("docker", "kind"), "existing", "kind"),
        ("kind", "", ("go",), "kind", "kind"),
        ("local", "/a/kubeconfig", ("docker", "kind"), "local", "local"),
    ],
)
def test_the_provider_is_the_named_one_or_what_the_machine_has(
    named: str | None,
    variable: str,
    there: tuple[str, ...],
    chosen: str,
    started: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
) -> None:
    monkeypatch.setenv("PATH", programs(tmp_path, **dict.fromkeys(there, "")))
    monkeypatch.setenv(existing.VARIABLE, variable)
    assert (providers.choose(named), providers.to_start(named)) == (chosen, started)


# --- kind: its command line


def test_what_kind_needs_and_is_missing_is_named(tmp_path: pathlib.Path) -> None:
    up = command_line("up", "--provider", "kind", str(tmp_path / "c"), path=programs(tmp_path / "bin", docker=""))
    assert up.returncode == 1
    assert up.stderr.startswith("test cluster: the provider kind needs kind (https://kind.sigs.k8s.io/")
    assert "kubectl (https://" in up.stderr
    assert "docker (" not in up.stderr
    assert not (tmp_path / "c").exists()


def test_a_docker_engine_that_does_not_run_is_said_and_nothing_is_made(tmp_path: pathlib.Path) -> None:
    bin_folder, cluster = tmp_path / "bin", tmp_path / "c"
    docker = "echo Cannot connect to the Docker daemon >&2; exit 1"
    path = programs(bin_folder, docker=docker, kind="", kubectl="", git="")
    up = command_line("up", "--provider", "kind", str(cluster), path=path)
    assert up.returncode == 1
    assert "`docker version` failed:\nCannot connect to the Docker daemon" in up.stderr
    assert calls(bin_folder, "kind") == []
    assert [file.name for file in cluster.iterdir()] == ["logs"]


def test_a_start_that_fails_ends_the_kind_cluster_that_it_made(tmp_path: pathlib.Path) -> None:
    bin_folder, cluster = tmp_path / "bin", tmp_path / "c"
    path = programs(bin_folder, docker="", kind="", kubectl="echo no network >&2; exit 1", git="")
    up = command_line("up", "--provider", "kind", str(cluster), path=path)
    assert up.returncode == 1
    assert "no network" in up.stderr
    assert "Traceback" not in up.stderr
    create, delete = calls(bin_folder, "kind")
    name = create.split()[3]
    assert kind.NAME.fullmatch(name)
    config, kubeconfig = cluster / "config/kind.yaml", cluster / "admin.kubeconfig"
    assert create == f"create cluster --name {name} --config {config} --kubeconfig {kubeconfig} --wait 5m"
    assert delete == f"delete cluster --name {name} --kubeconfig {kubeconfig}"
    assert [file.name for file in cluster.iterdir()] == ["logs"]


def in_a_folder(at: pathlib.Path, name: str) -> None:
    """What a kind cluster leaves in its folder when its supervisor is gone, as after a restart of the machine."""
    (at / "logs").mkdir(parents=True)
    (at / "logs/supervisor.log").touch()
    (at / folder.KIND).write_text(name)


def test_down_ends_the_kind_cluster_of_its_folder_alone_and_once(tmp_path: pathlib.Path) -> None:
    bin_folder, cluster = tmp_path / "bin", tmp_path / "c"
    path = programs(bin_folder, kind="")
    assert command_line("down", str(tmp_path / "other"), path=path).returncode == 0
    assert calls(bin_folder, "kind") == []

    in_a_folder(cluster, KIND_NAME)
    up, listed = (command_line(verb, str(cluster), path=path) for verb in ("up", "list"))
    assert "has a kind cluster still" in up.stderr
    assert "no cluster runs in" in listed.stderr
    for _ in range(2):
        assert command_line("down", str(cluster), path=path).returncode == 0
    kubeconfig = cluster / "admin.kubeconfig"
    assert calls(bin_folder, "kind") == [f"delete cluster --name {KIND_NAME} --kubeconfig {kubeconfig}"]
    assert [file.name for file in cluster.iterdir()] == ["logs"]


def test_down_without_kind_or_with_a_strange_name_keeps_the_record(tmp_path: pathlib.Path) -> None:
    in_a_folder(tmp_path / "a", KIND_NAME)
    down = command_line("down", str(tmp_path / "a"), path="/nowhere")
    assert (down.returncode, "kind is not installed (https://" in down.stderr) == (1, True)
    assert (tmp_path / "a" / folder.KIND).read_text() == KIND_NAME

    in_a_folder(tmp_path / "b", "production")
    down = command_line("down", str(tmp_path / "b"), path=programs(tmp_path / "bin", kind=""))
    assert (down.returncode, "names no cluster of the tests: 'production'" in down.stderr) == (1, True)
    assert calls(tmp_path / "bin", "kind") == []


# --- kind: what it is given


def test_kind_is_told_to_share_the_audit_log_and_the_pods_logs() -> None:
    config = kind.configuration(pathlib.Path("/c"))
    assert (config["kind"], config["apiVersion"]) == ("Cluster", "kind.x-k8s.io/v1alpha4")
    (node,) = config["nodes"]
    assert node["role"] == "control-plane"
    mounts = {mount["containerPath"]: mount["hostPath"] for mount in node["extraMounts"]}
    (text,) = node["kubeadmConfigPatches"]
    patch = yaml.safe_load(text)
    assert (patch["kind"], "apiVersion" in patch) == ("ClusterConfiguration", False)

    server = patch["apiServer"]["extraArgs"]
    assert all(
        isinstance(v, str) for part in ("apiServer", "controllerManager") for v in patch[part]["extraArgs"].values()
    )
    # What the API server's pod sees is a folder of the node, and what the node has there is a file or folder here.
    volumes = {volume["mountPath"]: volume["hostPath"] for volume in patch["apiServer"]["extraVolumes"]}
    policy, log = (pathlib.PurePath(server[flag]) for flag in ("audit-policy-file", "audit-log-path"))
    assert mounts[str(pathlib.PurePath(volumes[str(policy.parent)]) / policy.name)] == "/c/config/audit.yaml"
    assert pathlib.PurePath(mounts[volumes[str(log.parent)]]) / log.name == pathlib.PurePath("/c/logs/audit.log")
    assert mounts["/c/pod-logs"] == "/c/pod-logs"


def test_kwok_plays_the_tests_nodes_and_runs_on_the_real_one() -> None:
    container: Object = {"name": "kwok-controller", "args": ["--config=/root/.kwok/kwok.yaml", "--node-ip=$(POD_IP)"]}
    spec: Object = {"containers": [container], "volumes": [{"name": "kwok-config", "configMap": {"name": "kwok"}}]}
    documents = [{"kind": "Service", "spec": {}}, {"kind": "Deployment", "spec": {"template": {"spec": spec}}}]
    assert kind.on_the_real_node(kind.playing(documents, pathlib.Path("/c/pod-logs"))) is documents
    assert spec["nodeSelector"] == {"node-role.kubernetes.io/control-plane": ""}
    assert spec["tolerations"] == [{"key": "dispatch.test/real", "operator": "Exists"}]
    assert [volume["name"] for volume in spec["volumes"]] == ["kwok-config", "pod-logs"]
    assert container["volumeMounts"] == [{"name": "pod-logs", "mountPath": "/c/pod-logs", "readOnly": True}]
    assert container["args"][:2] == ["--config=/root/.kwok/kwok.yaml", "--node-ip=$(POD_IP)"]
    assert "--manage-nodes-with-label-selector=dispatch.test/kubelet=kwok" in container["args"]
    assert "--manage-nodes-with-annotation-selector=" in container["args"]  # of its configuration: both count


# --- components that are Deployments, on a real control plane


@pytest.fixture
def elsewhere(cluster: Cluster, namespace: Namespace, tmp_path: pathlib.Path) -> Iterator[Cluster]:
    """The run's cluster, taken for one whose Kueue is a Deployment; its pods are played, and Kueue itself runs on."""
    labels = {"app": "stand-in"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "main", "image": "none"}]}}
    namespace.create(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "stand-in"},
            "spec": {"replicas": 1, "selector": {"matchLabels": labels}, "template": template},
        }
    )
    controls = Controls.launch(tmp_path)
    place = Remote(tmp_path, cluster.kubeconfig, "kind", {"kueue": (namespace.name, "stand-in")})
    place.prepare()
    seen = Cluster(place, controls.serve(place))
    seen.ready("kueue")
    yield seen
    seen.close()


def test_a_deployment_is_killed_started_restarted_and_restored(elsewhere: Cluster, namespace: Namespace) -> None:
    (first,) = namespace.pods()
    elsewhere.kill("kueue")
    assert namespace.pods() == []
    assert [(process.name, process.state) for process in elsewhere.status()] == [("kueue", "stopped")]
    elsewhere.restore()
    (second,) = namespace.pods()
    assert elsewhere.status() == []

    elsewhere.restart("kueue")
    (third,) = namespace.pods()
    assert len({pod["metadata"]["uid"] for pod in (first, second, third)}) == 3


def test_what_a_deployment_cannot_do_is_refused_by_name(elsewhere: Cluster) -> None:
    for act, what in (
        (lambda: elsewhere.pause("kueue"), "pause kueue"),
        (lambda: elsewhere.resume("kueue"), "resume kueue"),
        (lambda: elsewhere.kill("etcd"), "stop or start etcd"),
        (lambda: elsewhere.start("kube-apiserver"), "stop or start kube-apiserver"),
        (lambda: elsewhere.restart("kueue", flags={"--a": "b"}), "run kueue with another configuration"),
        (elsewhere.audit_mark, "show its audit log"),
        (lambda: elsewhere.components.serving, "lend the API server's key to a proxy"),
        (lambda: elsewhere.components.ports, "put a proxy before a component"),
    ):
        with pytest.raises(Unsupported, match=f"^kind cannot {what}: this test needs the local provider$"):
            act()


# --- an existing cluster


@pytest.fixture
def given(cluster: Cluster, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The run's cluster, given as an existing one."""
    monkeypatch.setenv(existing.VARIABLE, str(cluster.kubeconfig))
    found = providers.start(tmp_path / "given", providers.choose())
    yield found
    providers.down(found.folder, found)
    assert [file.name for file in (tmp_path / "given").iterdir()] == ["logs"]
    assert cluster.find("Node", "kwok-0")


def test_a_gate_serves_jobs_on_an_existing_cluster(given: Cluster) -> None:
    with given.namespace() as namespace, given.controller("elsewhere"):
        namespace.wait_served()
        job = jobs.submit(namespace)
        jobs.running(namespace, job, epoch="1000001")
        jobs.finish(namespace, job)
        assert [process.name.rpartition("-")[0] for process in given.status()] == ["gate-elsewhere"]


def test_a_pods_log_cannot_be_written_on_an_existing_cluster(given: Cluster) -> None:
    with given.namespace(check=False) as namespace:
        pod = {"containers": [{"name": "main", "image": "none"}]}
        made = namespace.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": pod})
        with pytest.raises(Unsupported, match=r"an existing cluster cannot write a pod's log"):
            given.pods.log(made, "a line")


def test_a_test_that_asks_too_much_of_an_existing_cluster_is_skipped_with_the_reason(cluster: Cluster) -> None:
    file = "tests/integration/test_cluster.py"
    names = ("a_pod_runs_until", "a_stuck_pod", "the_audit_log", "paused_api_server")
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", file, "-k", " or ".join(names)]
    env = {**os.environ, existing.VARIABLE: str(cluster.kubeconfig)}
    ran = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
    assert "an existing cluster cannot show its audit log: this test needs the local provider" in ran.stdout
    assert "an existing cluster cannot pause kube-apiserver: this test needs the local provider" in ran.stdout
    assert ran.stdout.splitlines()[-1].lstrip("= ").startswith("2 passed, 2 skipped"), ran.stdout


def test_a_node_that_would_run_tests_pods_for_real_is_named(cluster: Cluster) -> None:
    name = f"real-{unique()}"
    cluster.nodes.create(name)
    try:
        assert list(existing.check(cluster.api)) == []
        cluster.nodes.lose(name, wait=False)  # for some seconds it is a node like any other, and not kwok's
        (reason,) = existing.check(cluster.api)
        assert f"kubectl taint node {name} dispatch.test/real=:NoSchedule" in reason
        cluster.nodes.taint(name, "dispatch.test/real")
        assert list(existing.check(cluster.api)) == []
    finally:
        cluster.nodes.delete(name)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be used"),
        ("{}", "cannot be used"),
        ("not: [yaml", "cannot be used"),
        (token_kubeconfig({"server": "https://127.0.0.1:9"}, "a-token", "default"), "port=9): Failed to establish"),
    ],
)
def test_a_kubeconfig_that_leads_nowhere_is_an_error_that_names_it(
    text: str | None, said: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kubeconfig"
    monkeypatch.setenv(existing.VARIABLE, str(file))
    if text:
        file.write_text(text)
    with pytest.raises(existing.ExistingError) as raised:
        existing.start(tmp_path / "c")
    assert f"${existing.VARIABLE}: " in str(raised.value)
    assert str(file) in str(raised.value)
    assert said in str(raised.value)
    assert not (tmp_path / "c").exists()


@pytest.fixture
def bare(cluster: Cluster, tmp_path: pathlib.Path) -> Iterator[Cluster]:
    """An API server with nothing installed. Only where the run's cluster is a local one."""
    assert cluster.components.ports
    described = Components(tmp_path, local.build_programs(local.quiet), {})
    processes = Processes.launch(tmp_path)
    described.ports = processes.ports(*PORTS)
    described.prepare()
    for name in ("etcd", "kube-apiserver"):
        processes.start(name, described.command(name).argv)
    started = Cluster(described, processes)
    started.ready("kube-apiserver")
    yield started
    started.close()


def test_what_a_cluster_does_not_serve_is_named_with_where_to_get_it(
    bare: Cluster, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(existing.VARIABLE, str(bare.kubeconfig))
    with pytest.raises(existing.ExistingError) as raised:
        existing.start(tmp_path / "c")
    lines = str(raised.value).splitlines()
    assert lines[0] == f"$DISPATCH_TEST_KUBECONFIG: the cluster of {bare.kubeconfig} cannot be used:"
    for part in ("workloads of kueue.x-k8s.io/v1beta2", "trainjobs of trainer.kubeflow.org/v1alpha1"):
        assert any(line.startswith(f"  - {part} are not served: install ") for line in lines)
    assert any("jobsets of jobset.x-k8s.io/v1alpha2" in line for line in lines)
    assert any("logs of kwok.x-k8s.io/v1alpha1" in line for line in lines)


# --- kubeconfigs of other forms


def test_a_kubeconfig_with_client_certificates_and_files_beside_it_is_understood(
    cluster: Cluster, tmp_path: pathlib.Path
) -> None:
    server = cluster.components.serving.certificate.parent  # a local cluster's keys
    for name in ("ca.crt", "kubelet-client.crt", "kubelet-client.key"):
        (tmp_path / name).write_bytes((server / name).read_bytes())
    other = {"name": "other", "cluster": {"server": "https://127.0.0.1:9"}}
    mine = {"server": cluster.api.server, "certificate-authority": "ca.crt"}
    user = {"client-certificate": "kubelet-client.crt", "client-key": "kubelet-client.key"}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [other, {"name": "mine", "cluster": mine}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "c", "context": {"cluster": "mine", "user": "u"}}],
    }
    file = tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}

    def who(kubeconfig: pathlib.Path) -> str:
        api = Api(kubeconfig)
        answer = api.request("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", review)
        api.close()
        name: str = answer["status"]["userInfo"]["username"]
        return name

    assert who(file) == KUBELET_CLIENT

    place = Remote(tmp_path, file, "it")
    place.prepare()
    assert place.authority.read_bytes() == (tmp_path / "ca.crt").read_bytes()
    moved = tmp_path / "config/moved.kubeconfig"
    token = yaml.safe_load(cluster.kubeconfig.read_text())["users"][0]["user"]["token"]
    place.write_kubeconfig(moved, token)
    assert who(moved) == "admin"


def test_the_stages_of_kwoks_release_are_cut_to_ours() -> None:
    names = ("node-initialize", "node-heartbeat-with-lease", "pod-ready", "pod-complete", "pod-delete")
    published: list[Object] = [
        {"kind": "Stage", "metadata": {"name": name}, "spec": {"selector": {"matchExpressions": []}}} for name in names
    ]
    cut = stages.fitted(published)
    assert [stage["metadata"]["name"] for stage in cut] == [name for name in names if name != "pod-complete"]
    assert stages.STUCK in str(cut[-1])
