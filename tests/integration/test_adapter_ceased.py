"""`ceased`: whether anything of a submission can still run, and what says so."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

import adapter
from adapter import Answer, Ceased, Conflict, Handle
from tests.adapters import World


def test_a_job_that_has_not_ended_can_run(world: World) -> None:
    handle = world.started()
    no = Ceased(Answer.NO, f"TrainJob {handle.name} has not ended")
    assert world.backend.ceased(handle) == no
    world.backend.open(handle)
    world.running(handle)
    assert world.backend.ceased(handle) == no


@pytest.mark.parametrize("code", [0, 1])
def test_a_job_that_ended_and_whose_pods_have_ended_cannot(world: World, code: int) -> None:
    handle = world.opened()
    world.end(handle, code=code)
    world.wait(lambda: world.backend.ceased(handle).value is Answer.YES, "all has ended")
    evidence = world.backend.ceased(handle).evidence
    assert evidence == (f"{len(world.namespace.pods(handle.name))} pods are left, all have ended")


def test_the_nodes_of_pods_that_have_ended_are_not_asked_for(world: World) -> None:
    handle = world.opened()
    world.end(handle)
    world.wait(lambda: world.backend.ceased(handle).value is Answer.YES, "all has ended")
    mark = world.cluster.audit_mark()
    assert world.backend.ceased(handle).value is Answer.YES
    read = {event["objectRef"]["resource"] for event in world.cluster.audit_events(world.user, since=mark)}
    assert "pods" in read
    assert "nodes" not in read


def test_a_job_that_is_gone_cannot(world: World) -> None:
    handle = world.opened()
    world.backend.stop(handle)
    assert world.backend.ceased(handle) == Ceased(Answer.YES, "no pods are left")
    later = world.opened(job=handle.job, submission=2)
    assert world.backend.ceased(handle).value is Answer.YES
    assert world.backend.ceased(later).value is Answer.NO


def test_a_failed_job_that_lost_its_jobset_can_run_again(plain: World) -> None:
    """Trainer 2.3 takes Failed away and makes the JobSet anew: fixed upstream after that version."""
    handle = plain.opened()
    plain.end(handle, code=1)
    plain.wait(lambda: plain.backend.ceased(handle).value is Answer.YES, "all has ended")
    plain.cluster.pause("trainer")
    try:
        plain.namespace.delete("JobSet", handle.name)
        plain.wait(lambda: not plain.namespace.pods(handle.name), "its pods are gone")
        no = Ceased(Answer.NO, f"TrainJob {handle.name} has lost its JobSet, which Trainer makes anew")
        assert plain.backend.ceased(handle) == no
        with pytest.raises(Conflict, match="has failed and lost its JobSet, which Trainer makes anew"):
            plain.backend.start(plain.spec(job=handle.job, submission=2))
    finally:
        plain.cluster.resume("trainer")
    plain.running(handle)  # so it does


@pytest.fixture
def node(world: World) -> Iterator[str]:
    """A node of the test's own."""
    name = f"own-{secrets.token_hex(4)}"
    world.cluster.nodes.create(name, labels={"test": name})
    yield name
    if world.cluster.find("Node", name):
        world.cluster.nodes.delete(name)


def stuck(world: World, node: str) -> tuple[Handle, str]:
    """A deleted job whose one pod still terminates on the node."""
    handle = world.opened(nodes=1, nodeSelector={"test": node})
    (pod,) = world.running(handle, 1)
    world.cluster.pods.stick(pod)
    world.namespace.delete("TrainJob", handle.name)
    world.wait(lambda: [left.split()[0] for left in world.left(handle.job)] == ["Pod"], "only its pod is left")
    return handle, pod["metadata"]["name"]


def test_a_pod_that_terminates_runs(world: World, node: str) -> None:
    handle, pod = stuck(world, node)
    assert world.backend.ceased(handle) == Ceased(Answer.NO, f"pod {pod} on {node} has not ended")


def test_a_pod_on_an_unreachable_node_may_run_until_it_is_out_of_service(world: World, node: str) -> None:
    handle, pod = stuck(world, node)
    world.cluster.nodes.lose(node)
    unreachable = f"pod {pod} on {node}, which is unreachable, has not ended"
    assert world.backend.ceased(handle) == Ceased(Answer.NO, unreachable)
    world.cluster.nodes.taint(node, "node.kubernetes.io/out-of-service", effect="NoSchedule")
    assert world.backend.ceased(handle) == Ceased(Answer.YES, f"pod {pod} on {node}, which is out of service")


def test_of_a_pod_whose_node_is_gone_nobody_knows(world: World, node: str) -> None:
    handle, pod = stuck(world, node)
    world.cluster.nodes.delete(node)
    unknown = f"pod {pod} on {node}, whose Node is gone: its machine may run on"
    assert world.backend.ceased(handle) == Ceased(Answer.UNKNOWN, unknown)
    world.wait(lambda: world.backend.ceased(handle).value is Answer.YES, "Kubernetes collects the pod", 120)


def test_a_successor_of_the_same_name_is_not_counted(world: World) -> None:
    handle = world.opened()
    gone = adapter.Handle(handle.namespace, handle.name, "another")
    assert world.backend.ceased(gone) == Ceased(Answer.YES, "no pods are left")
