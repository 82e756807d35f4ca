"""What tests share: one test cluster per run, and a namespace with queues of its own per test."""

from __future__ import annotations

import pathlib
import signal
from collections.abc import Callable, Generator, Iterator
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from tests import adapters, packaged
from tests.adapters import World
from tests.cluster import local, providers
from tests.cluster.cluster import Cluster, ClusterError, Unsupported
from tests.cluster.namespaces import Namespace
from tests.faults.proxy import Proxy

# A shell starts what runs in the background without Ctrl-C, and so would be all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# On a busy machine time tells nothing about a test.
hypothesis.settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
)
hypothesis.settings.load_profile("any-machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="the full counts and sizes, and the tests marked long")
    where = "where the test cluster runs; else $DISPATCH_TEST_KUBECONFIG, or local, or kind without Go"
    parser.addoption("--provider", choices=providers.NAMES, help=where)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Keeps the tests of the real node in one process: one at a time on a machine."""
    return RealNodeScheduling(config, log)


class RealNodeScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist ships no types
    def _split_scope(self, nodeid: str) -> str:
        return "tests/node" if nodeid.startswith("tests/node/") else nodeid


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests marked long, unless they are wanted."""
    if not config.getoption("--long"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="takes long: give --long to run it"))


@pytest.fixture(scope="session")
def count(pytestconfig: pytest.Config) -> Callable[[int, int], int]:
    """How often a random scenario is run: the first number, or the second with --long."""
    return lambda few, many: many if pytestconfig.getoption("--long") else few


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Builds the local test cluster before the first test: the first time takes longer than a test's timeout.

    Where kind pulls its images instead, the first test gets more time.
    """
    wanted = [item for item in session.items if "cluster" in getattr(item, "fixturenames", ())]
    if not wanted or session.config.option.collectonly:
        return
    provider = providers.choose(session.config.option.provider)
    if provider == "kind":
        wanted[0].add_marker(pytest.mark.timeout(1800))
    if provider == "local":
        try:
            local.build_programs(_progress(session.config))
        except local.LocalError as error:
            session.config.stash[_UNBUILT] = str(error)


_UNBUILT = pytest.StashKey[str]()
_RUNNING = pytest.StashKey[Cluster]()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Cluster]:
    """The run's cluster. It goes when pytest ends, however it ends; kind's, unless pytest is killed."""
    if reason := pytestconfig.stash.get(_UNBUILT, ""):
        pytest.fail(reason, pytrace=False)
    provider = providers.choose(pytestconfig.option.provider)
    try:
        started = providers.start(tmp_path_factory.mktemp("cluster"), provider)
    except ClusterError as error:
        pytest.fail(str(error), pytrace=False)
    pytestconfig.stash[_RUNNING] = started
    yield started
    providers.down(started.folder, started)
    del pytestconfig.stash[_RUNNING]


@pytest.fixture(autouse=True)
def _whole_again(pytestconfig: pytest.Config) -> Iterator[None]:
    """What a test that failed half-way has left paused or killed runs again before the next one."""
    yield
    if running := pytestconfig.stash.get(_RUNNING, None):
        running.restore()


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[Namespace]:
    """A fresh namespace with four CPUs of quota and the gate's check on its queue."""
    with cluster.namespace() as made:
        yield made


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[Proxy]:
    """A proxy in front of the API server, which does what it is told, for this test alone."""
    with Proxy(cluster) as made:
        yield made


@pytest.fixture(scope="module")
def _gate(cluster: Cluster) -> Iterator[None]:
    """A controller that lets jobs through, for the tests of one module."""
    with cluster.controller():
        yield


@pytest.fixture(params=adapters.MODES)
def world(cluster: Cluster, request: pytest.FixtureRequest, _gate: None) -> Iterator[World]:
    """The adapter in a namespace of its own, in each of its modes."""
    with adapters.world(cluster, request.param) as made:
        yield made


@pytest.fixture
def plain(cluster: Cluster) -> Iterator[World]:
    """The same, in plain mode."""
    with adapters.world(cluster, "plain") as made:
        yield made


@pytest.fixture
def kueue(cluster: Cluster, _gate: None) -> Iterator[World]:
    """The same, in Kueue mode."""
    with adapters.world(cluster, "kueue") as made:
        yield made


@pytest.fixture(scope="session")
def zipapp(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The packaged controller, built once per run."""
    return packaged.build(tmp_path_factory.mktemp("package"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None]:
    """Skips a test whose fixtures ask more of the cluster than its provider has. The next hook: one that asks so."""
    yield from _unsupported_skips()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    yield from _unsupported_skips()


def _unsupported_skips() -> Generator[None]:
    try:
        yield
    except Unsupported as error:
        pytest.skip(str(error))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Says with a failed test where the components' logs are, and which component is dead."""
    report = yield
    running = item.config.stash.get(_RUNNING, None)
    if running and report.failed:
        ended = [p.name for p in running.status() if p.essential and p.state == "died"]
        text = f"logs: {running.folder}/logs" + (f"\nended unasked: {', '.join(ended)}" if ended else "")
        report.sections.append(("test cluster", text))
    return report


def _progress(config: pytest.Config) -> Callable[[str], None]:
    """Writes past the capture: a build of many minutes must not look like a hang."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")

    def write(line: str) -> None:
        if reporter:
            reporter.write_line(f"test cluster: {line}")

    return write
