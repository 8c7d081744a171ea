"""Hooks and fixtures of all tests: a real nats-server per worker, servers of one test, unique names, a TCP proxy."""

import os
import random
import re
import signal
import uuid
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from purveyor.jetstream.address import Address
from purveyor.jetstream.server import EmbeddedServer, ServerEvent, ServerOptions
from purveyor.queues.client import Queues, connect

pytest.register_assert_rewrite("tests.support")  # before its first import, so that its assertions show their values

from tests.support.nats_servers import FAST, OwnServer  # noqa: E402
from tests.support.proxy import TcpProxy  # noqa: E402
from tests.support.scale import LONG  # noqa: E402

os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
"""The JVM of a test lives for seconds: compiler optimisations would only take CPU time from the tests."""

TESTS = Path(__file__).parent
WITH_SPARK = {TESTS / "pipeline", TESTS / "spark"}
"""The folders whose tests run Spark or test rules for Spark."""


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A background process of a script ignores Ctrl-C, and so would the programs that tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("tests", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")  # no property test fails because the machine is slow


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in the random order of this seed")


def pytest_sessionstart(session: pytest.Session) -> None:
    seed, terminal = session.config.getoption("shuffle"), session.config.pluginmanager.get_plugin("terminalreporter")
    if seed is not None and terminal is not None:
        terminal.write_line(f"random order: --shuffle {seed}")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests that need Spark, so that `-m "not spark"` leaves them out."""
    if WITH_SPARK & set(item.path.parents) or "spark" in getattr(item, "fixturenames", ()):
        item.add_marker("spark")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of `make chaos` in `make test`, and let each worker begin with the longest tests."""
    if not LONG:
        left_out = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    if (seed := config.getoption("shuffle")) is not None:
        random.Random(seed).shuffle(items)
        return
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    items[:] = [item for share in shares(items, workers) for item in share]


def shares(items: list[pytest.Item], workers: int) -> list[list[pytest.Item]]:
    """Divide the tests into one share per worker, of equal length; each begins with its part of the longest tests."""
    first = [item for item in items if item.get_closest_marker("first")]
    others = [item for item in items if not item.get_closest_marker("first")]
    found, begin = [], 0
    for worker in range(workers):
        longest = first[worker::workers]
        size = len(items) * (worker + 1) // workers - len(items) * worker // workers - len(longest)
        found.append(longest + others[begin : begin + max(size, 0)])
        begin += max(size, 0)
    found[-1] += others[begin:]
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape lone surrogates in captured logs: xdist cannot send them, and its worker would end."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """Start the server that all tests of this worker share: use `unique` names, and do not stop it."""
    with EmbeddedServer(tmp_path_factory.mktemp("nats") / "store", FAST) as server:
        yield server


@pytest.fixture
def address(nats_server: EmbeddedServer) -> Address:
    """Return the address of the shared server, with credentials."""
    return nats_server.address


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[OwnServer]:
    """Return a factory of servers for this test; they are stopped after it."""
    started: list[EmbeddedServer] = []

    def start(
        options: ServerOptions = FAST,
        *,
        directory: Path | None = None,
        on_event: Callable[[ServerEvent], None] | None = None,
    ) -> EmbeddedServer:
        where = directory if directory is not None else tmp_path / f"nats-{len(started)}"
        server = EmbeddedServer(where, options, on_event=on_event)
        started.append(server)
        return server.start()

    yield start
    for server in reversed(started):
        server.stop()


@pytest.fixture
def unique(request: pytest.FixtureRequest) -> str:
    """Return a unique name, valid for a stream, a consumer, a bucket, a key or a token of a subject."""
    words = re.sub(r"[^A-Za-z0-9]+", "-", request.node.name).strip("-")
    return f"{words[:32]}-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def tcp_proxy(address: Address) -> Iterator[TcpProxy]:
    """Return a proxy in front of the shared server; create a `TcpProxy` for another server."""
    with TcpProxy(*address.hosts()[0]) as proxy:
        yield proxy


@pytest.fixture
async def queues(address: Address) -> AsyncIterator[Queues]:
    """Connect to the shared server."""
    async with connect(address, name="tests", patience_seconds=60) as connected:
        yield connected
