"""The gate's permissions: what it asks of the API server is what is documented, and what is missing stays shut."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from tests import jobs
from tests.cluster import gate as gates
from tests.cluster.api import Object
from tests.cluster.audit import Call
from tests.cluster.cluster import Cluster
from tests.cluster.namespaces import Namespace
from tests.cluster.waiting import unique

KUEUE, TRAINER, JOBSET = "kueue.x-k8s.io", "trainer.kubeflow.org", "jobset.x-k8s.io"
# The verbs that the reference documents: (verb, group, resource, subresource).
DOCUMENTED: set[Call] = {
    ("list", KUEUE, "admissionchecks", ""),
    ("update", KUEUE, "admissionchecks", "status"),
    ("list", KUEUE, "workloads", ""),
    ("watch", KUEUE, "workloads", ""),
    ("update", KUEUE, "workloads", "status"),
    ("get", TRAINER, "trainjobs", ""),
    ("update", TRAINER, "trainjobs", ""),
    ("get", JOBSET, "jobsets", ""),
    ("list", "", "pods", ""),
    ("get", "coordination.k8s.io", "leases", ""),
    ("create", "coordination.k8s.io", "leases", ""),
    ("update", "coordination.k8s.io", "leases", ""),
}
LEASES = [{"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "update"]}]


def rules(calls: set[Call]) -> list[Object]:
    """The rules of a role that allows exactly these calls."""
    return [
        {"apiGroups": [group], "resources": [f"{resource}/{sub}" if sub else resource], "verbs": [verb]}
        for verb, group, resource, sub in sorted(calls)
    ]


TRIMMED = rules({call for call in DOCUMENTED if call[2] != "leases"})


class Account:
    """A ServiceAccount of the gate's namespace with a ClusterRole of its own, that a test may change."""

    def __init__(self, cluster: Cluster, cluster_rules: list[Object], *, leases: bool = True) -> None:
        self.cluster, self.name = cluster, f"gate-{unique()}"
        self.user = f"system:serviceaccount:{gates.NAMESPACE}:{self.name}"
        self.kubeconfig: pathlib.Path = cluster.token_kubeconfig(gates.NAMESPACE, self.name)
        cluster.grant(gates.NAMESPACE, self.name, cluster_rules, name=self.name)
        if leases:
            self.grant_leases()

    def grant_leases(self) -> None:
        self.cluster.grant(gates.NAMESPACE, self.name, LEASES, inside=gates.NAMESPACE, name=self.name)

    def may(self, cluster_rules: list[Object]) -> None:
        """From now on it may do this in the whole cluster."""
        self.cluster.patch("ClusterRole", self.name, None, {"rules": cluster_rules})


def refused(cluster: Cluster, user: str, since: int) -> list[Any]:
    events = cluster.audit_events(user, since=since)
    return [event for event in events if event["responseStatus"]["code"] in (401, 403)]


@pytest.mark.parametrize("role", ["page", "trimmed"])
def test_it_makes_the_documented_calls_and_no_other(cluster: Cluster, role: str) -> None:
    account = Account(cluster, gates.RULES, leases=False) if role == "page" else Account(cluster, TRIMMED)
    since = cluster.audit_mark()
    with cluster.controller(kubeconfig=account.kubeconfig) as gate, cluster.namespace() as namespace:
        # every path: a neighbour's job, a first admission, one that waits for a pod, one that is held, a readmission
        namespace.create(jobs.batch_job("neighbour"))
        job = jobs.submit(namespace, nodes=2)
        first, _ = jobs.running(namespace, job, count=2, epoch="1000001")
        cluster.pods.stick(first)
        other = jobs.preempt(namespace, job, cpu="3")
        namespace.patch("TrainJob", job, {"metadata": {"annotations": {jobs.HOLD: "1"}}})
        namespace.delete("TrainJob", other)
        jobs.wait_message(namespace, job, "held: instance 1")
        namespace.patch("TrainJob", job, {"metadata": {"annotations": {jobs.HOLD: "released-1"}}})
        jobs.wait_message(namespace, job, "waiting for 1 pods")
        cluster.pods.unstick(first)
        jobs.running(namespace, job, count=2, epoch="1000002")
        renewed = cluster.get("Lease", gate.lease, gates.NAMESPACE)
        cluster.wait(lambda: cluster.get("Lease", gate.lease, gates.NAMESPACE) != renewed, "it renews the Lease")
        assert jobs.check(namespace, "neighbour")["state"] == "Ready"
        assert cluster.audit(account.user, since=since) == DOCUMENTED
        assert not refused(cluster, account.user, since)
        assert all("objectRef" in event for event in cluster.audit_events(account.user, since=since))


def test_no_test_so_far_has_made_it_call_anything_else(cluster: Cluster) -> None:
    assert cluster.audit(gates.USER) <= DOCUMENTED


def test_without_the_checks_status_the_pass_fails_and_the_watch_goes_on(cluster: Cluster) -> None:
    account = Account(cluster, TRIMMED)
    with cluster.controller(kubeconfig=account.kubeconfig) as gate, cluster.namespace() as before:
        before.wait_served()
        account.may(rules({call for call in DOCUMENTED if call[2:] != ("admissionchecks", "status")}))
        with cluster.namespace() as after:  # its check has to be set Active
            line = gate.wait_log('msg="full pass"')
            assert "level=ERROR" in line
            assert "admissionchecks" in line
            assert "HTTP 403" in line
            since = cluster.audit_mark()
            job = jobs.submit(before)
            jobs.running(before, job, epoch="1000001")
            cluster.wait(lambda: len(passes(cluster, account, since)) >= 2, "two more passes have failed")
            # the list of Workloads is skipped; those that there are, are of single ones
            names = [event["requestURI"] for event in cluster.audit_events(account.user, since=since)]
            assert not [name for name in names if "/v1beta2/workloads?limit" in name]
            assert not jobs.condition(cluster.get("AdmissionCheck", after.name), "Active")
            account.may(TRIMMED)
            after.wait_served()


def passes(cluster: Cluster, account: Account, since: int) -> list[Any]:
    return [e for e in refused(cluster, account.user, since) if e["objectRef"]["resource"] == "admissionchecks"]


def test_a_check_that_is_active_already_needs_no_write(cluster: Cluster, namespace: Namespace) -> None:
    account = Account(cluster, rules({call for call in DOCUMENTED if call[2:] != ("admissionchecks", "status")}))
    namespace.activate()
    with cluster.controller(kubeconfig=account.kubeconfig):
        jobs.running(namespace, jobs.submit(namespace), epoch="1000001")


def test_what_is_missing_is_logged_once_and_lets_nothing_through(cluster: Cluster, namespace: Namespace) -> None:
    def without(*missing: tuple[str, str]) -> list[Object]:
        return rules({call for call in DOCUMENTED if (call[0], call[2]) not in missing and call[2] != "leases"})

    steps = [("get", "trainjobs"), ("get", "jobsets"), ("list", "pods"), ("update", "trainjobs")]
    account = Account(cluster, without(*steps))
    with cluster.controller(kubeconfig=account.kubeconfig) as gate:
        job = jobs.submit(namespace)
        for number, (verb, resource) in enumerate(steps):
            line = gate.wait_log(rf"cannot {verb} resource \"{resource}\"")
            assert "level=ERROR msg=reconcile" in line
            assert job in line
            if resource == "trainjobs" and verb == "get":  # whose the job is, it cannot know
                assert jobs.check(namespace, job)["message"] == ""
            else:
                jobs.wait_message(namespace, job, "cannot go on: ")
                jobs.wait_message(namespace, job, f'cannot {verb} resource "{resource}"')
            assert jobs.check(namespace, job)["state"] == "Pending"
            assert jobs.admission_of(namespace, job) == 0
            assert_passes(namespace, f"neighbour-{number}")  # the others are not stopped by it
            account.may(without(*steps[number + 1 :]))
        jobs.running(namespace, job, epoch="1000001")
        texts = [line.partition("msg=")[2] for line in gate.log if "msg=reconcile" in line and job in line]
        assert len(texts) == len(set(texts)) == len(steps)


def assert_passes(namespace: Namespace, name: str) -> None:
    """A batch Job of this name is approved."""
    namespace.create(jobs.batch_job(name, cpu="100m"))
    namespace.cluster.wait(lambda: jobs.check(namespace, name)["state"] == "Ready", f"{name} is approved")


def test_without_its_lease_it_leads_nothing(cluster: Cluster, namespace: Namespace) -> None:
    account = Account(cluster, TRIMMED, leases=False)
    with cluster.controller(kubeconfig=account.kubeconfig, leads=False) as gate:
        line = gate.wait_log("msg=lease")
        assert "level=ERROR" in line
        assert "HTTP 403" in line
        since = cluster.audit_mark()
        cluster.wait(lambda: refused(cluster, account.user, since), "it has tried again")
        assert len([line for line in gate.log if "msg=lease" in line]) == 1
        account.grant_leases()
        gate.wait_log("msg=leading")
        namespace.wait_served()
