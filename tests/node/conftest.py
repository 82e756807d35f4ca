"""The real node, one per run; without root, or where it cannot run, these tests are skipped with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster import local, real_node
from tests.cluster.cluster import Cluster
from tests.cluster.components import Components
from tests.cluster.real_node import RealNode
from tests.node import site
from tests.node.site import Site

_MISSING = pytest.StashKey[str]()
_UNBUILT = pytest.StashKey[str]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Builds the node's programs before the first test, when one will need them."""
    config = session.config
    wanted = any("real_node" in getattr(item, "fixturenames", ()) for item in session.items)
    if not wanted or config.option.collectonly:
        return
    config.stash[_MISSING] = real_node.missing()
    if not config.stash[_MISSING]:
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        try:
            local.build_node_programs(lambda line: reporter.write_line(f"real node: {line}") if reporter else None)
        except local.LocalError as error:
            config.stash[_UNBUILT] = str(error)


@pytest.fixture(scope="session", name="real_node")
def _real_node(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> RealNode:
    """The real node of the run's cluster, Ready. It goes with the cluster."""
    if reason := pytestconfig.stash.get(_MISSING, ""):
        pytest.skip(reason)
    if reason := pytestconfig.stash.get(_UNBUILT, ""):
        pytest.fail(reason, pytrace=False)
    cluster: Cluster = request.getfixturevalue("cluster")  # only now: where it is skipped, none is started
    if not isinstance(cluster.components, Components):
        pytest.skip("the real node joins the test cluster's local provider only: see python3 -m tests.cluster")
    try:
        return local.add_real_node(cluster)
    except local.LocalError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(name="site")
def _site(real_node: RealNode) -> Iterator[Site]:
    """A namespace whose jobs run on the real node, with quota for one of them."""
    with site.on(real_node) as made:
        yield made
