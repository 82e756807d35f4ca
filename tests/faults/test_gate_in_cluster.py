"""The gate in a pod's guise: it finds the API server and its token where a pod does, and follows the token's rotation.

The Authorization header is judged on the wire, by the proxy that stands in for the API server's service address.
"""

from __future__ import annotations

import pytest

from tests import jobs
from tests.cluster.cluster import Cluster
from tests.cluster.gate import ACCOUNT, NAMESPACE, PodFiles, account
from tests.cluster.namespaces import Namespace
from tests.faults.proxy import Proxy, Request

LOST = "dispatch-admission: lost the leader-election Lease"


@pytest.fixture
def pod(cluster: Cluster, proxy: Proxy) -> PodFiles:
    """A pod's files that lead to the proxy; the ServiceAccount is the gate's."""
    account(cluster)
    return PodFiles(cluster, "127.0.0.1", proxy.port)


def new_token(cluster: Cluster) -> tuple[str, str]:
    """A token of the gate's account that lives as long as a Secret; returns it and the Secret's name."""
    return cluster.revocable_token(NAMESPACE, ACCOUNT)


def carries(request: Request, token: str) -> bool:
    scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and credentials == token


def refused(proxy: Proxy) -> list[Request]:
    return [request for request in proxy.requests() if request.status == 401]


def test_every_request_carries_the_pods_token(
    cluster: Cluster, proxy: Proxy, pod: PodFiles, namespace: Namespace
) -> None:
    token, _ = new_token(cluster)
    pod.set_token(token)
    with cluster.controller(in_cluster=pod):
        job = jobs.submit(namespace)
        jobs.running(namespace, job, epoch="1000001")
    seen = proxy.requests()
    assert {request.method for request in seen} == {"GET", "POST", "PUT"}
    assert all(carries(request, token) for request in seen)
    assert not refused(proxy)


def test_a_rotated_token_costs_one_refused_request(
    cluster: Cluster, proxy: Proxy, pod: PodFiles, namespace: Namespace
) -> None:
    old, secret = new_token(cluster)
    pod.set_token(old)
    with cluster.controller(in_cluster=pod, resync="10m") as gate:
        namespace.wait_served()
        new, _ = new_token(cluster)
        pod.set_token(new)
        cluster.delete("Secret", secret, NAMESPACE)
        cluster.wait(lambda: refused(proxy), "the old token is refused")  # the server trusts it for 10 s more
        job = jobs.submit(namespace)
        jobs.running(namespace, job, epoch="1000001")
        (once,) = refused(proxy)
        assert carries(once, old)
        assert all(carries(request, new) for request in proxy.requests(since=once.at) if request is not once)
        assert gate.exit_code is None
        assert not [line for line in gate.log if "level=ERROR" in line]


def test_without_reading_the_token_again_a_rotation_costs_the_lease(
    cluster: Cluster, proxy: Proxy, pod: PodFiles, namespace: Namespace
) -> None:
    old, secret = new_token(cluster)
    pod.set_token(old)
    settings = {"RENEW_DEADLINE": 6}
    with cluster.controller(in_cluster=pod, resync="10m", guards_off=["renew"], settings=settings) as gate:
        namespace.wait_served()
        pod.set_token(new_token(cluster)[0])
        cluster.delete("Secret", secret, NAMESPACE)
        assert gate.wait_end() == 1
        assert LOST in gate.log
        assert refused(proxy)
        assert all(carries(request, old) for request in refused(proxy))
