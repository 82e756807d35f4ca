"""The proxy itself: what the other tests of this folder take for granted."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import pytest
import urllib3

from tests.cluster.api import Api, ApiError, Object, path
from tests.cluster.cluster import Cluster
from tests.cluster.namespaces import Namespace
from tests.faults.proxy import Proxy

CUT = (urllib3.exceptions.HTTPError, OSError)


@pytest.fixture
def api(cluster: Cluster, proxy: Proxy) -> Iterator[Api]:
    client = Api(proxy.kubeconfig(cluster.kubeconfig))
    yield client
    client.close()


def config_map(name: str) -> Object:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}}


def test_it_passes_requests_on_and_records_them(api: Api, proxy: Proxy, namespace: Namespace) -> None:
    api.create(config_map("one"), namespace.name)
    names = [item["metadata"]["name"] for item in api.list("ConfigMap", namespace.name, fields="metadata.name=one")]
    assert names == ["one"]
    assert namespace.get("ConfigMap", "one")
    post, get = proxy.requests(path=f"/{namespace.name}/configmaps")
    assert (post.method, post.status, json.loads(post.body)["metadata"]["name"]) == ("POST", 201, "one")
    assert (get.method, get.status, get.query) == ("GET", 200, {"fieldSelector": "metadata.name=one"})
    assert get.headers["authorization"].startswith("Bearer ")


def test_it_answers_itself_as_often_as_it_is_told(api: Api, proxy: Proxy) -> None:
    rule = proxy.answer(429, "GET", "/namespaces", times=2, headers={"Retry-After": "1"})
    for _ in range(2):
        with pytest.raises(ApiError, match="429 TooManyRequests"):
            api.list("Namespace")
    assert api.list("Namespace")
    assert [request.server_status for request in proxy.requests()] == [None, None, 200]
    assert len(rule.hits) == 2


def test_a_lost_answer_is_of_a_write_that_was_done(api: Api, proxy: Proxy, namespace: Namespace) -> None:
    proxy.lose_answer("POST", times=1)
    proxy.lose_request("DELETE", times=1)
    with pytest.raises(CUT):
        api.create(config_map("lost"), namespace.name)
    assert namespace.get("ConfigMap", "lost")
    with pytest.raises(CUT):
        api.delete("ConfigMap", "lost", namespace.name)
    assert namespace.get("ConfigMap", "lost")
    assert [(r.status, r.server_status) for r in proxy.requests()] == [(None, 201), (None, None)]
    api.delete("ConfigMap", "lost", namespace.name)
    assert namespace.find("ConfigMap", "lost") is None


def test_it_is_away_and_comes_back_on_the_same_port(api: Api, proxy: Proxy) -> None:
    assert api.list("Namespace")
    with proxy.away(), pytest.raises(CUT):
        api.list("Namespace")
    assert api.list("Namespace")


class Watching:
    """Reads a watch of config maps in a thread of its own."""

    def __init__(self, proxy: Proxy, cluster: Cluster, namespace: Namespace) -> None:
        self.text, self.ended = b"", threading.Event()
        self._pool = urllib3.PoolManager(ca_certs=str(cluster.components.authority), retries=False)
        self._cluster, self._url = cluster, proxy.server + path("ConfigMap", namespace.name) + "?watch=true"
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Watching:
        self._thread.start()
        self.wait("kube-root-ca.crt")  # every namespace gets this one
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(timeout=20)
        self._pool.clear()
        assert self.ended.is_set()

    def wait(self, text: str) -> None:
        self._cluster.wait(lambda: text.encode() in self.text, f"the watch has read {text}", interval=0.05)

    def silent(self, text: str) -> None:
        """Nothing is to be seen arriving: gives it the time that an event takes to be read here, many times over."""
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            assert text.encode() not in self.text
            assert not self.ended.wait(0.05)

    def _read(self) -> None:
        headers = self._cluster.admin.default_headers | self._token()
        try:
            response = self._pool.request("GET", self._url, headers=headers, preload_content=False)
            for chunk in response.stream():
                self.text += chunk
        except CUT:
            self.ended.set()

    def _token(self) -> dict[str, str]:
        settings = self._cluster.admin.configuration.auth_settings().values()
        return {setting["key"]: setting["value"] for setting in settings}


def test_a_watch_passes_event_by_event_until_it_is_cut(cluster: Cluster, proxy: Proxy, namespace: Namespace) -> None:
    with Watching(proxy, cluster, namespace) as watching:
        namespace.create(config_map("seen"))
        watching.wait("seen")
        assert proxy.cut("GET", "watch=true") == 1
        assert watching.ended.wait(20)


def test_a_stalled_watch_stays_open_and_silent(cluster: Cluster, proxy: Proxy, namespace: Namespace) -> None:
    with Watching(proxy, cluster, namespace) as watching:
        with proxy.stall("GET", "watch=true"):
            namespace.create(config_map("late"))
            watching.silent("late")
        watching.wait("late")
        proxy.cut()


def test_a_watch_stalls_after_so_many_events(cluster: Cluster, proxy: Proxy, namespace: Namespace) -> None:
    with Watching(proxy, cluster, namespace) as watching:
        (watch,) = proxy.open_requests("GET", "watch=true")
        stalled = proxy.stall_open("GET", lines=watch.lines + 1)
        for name in ("one", "two", "three"):
            namespace.create(config_map(name))
        watching.wait('"one"')
        watching.silent('"two"')
        stalled.remove()
        watching.wait('"three"')
        assert proxy.cut("GET", "watch=true") == 1


def test_an_answer_is_cut_in_the_middle(api: Api, proxy: Proxy) -> None:
    proxy.cut_after(100, "GET", "/namespaces", times=1)
    with pytest.raises(CUT):
        api.list("Namespace")
    assert api.list("Namespace")
