"""The console as an operator meets it: a real `purveyor serve api`, a real nats-server of its own, a real Chromium.

One of each per worker. The browser lives in a thread with an event loop of its own, so that tests can be plain
functions and others may run loops in the main thread.
"""

from collections.abc import Iterator

import pytest

from purveyor.jetstream.server import EmbeddedServer
from purveyor.queues.catalogue import internal_queues
from purveyor.queues.client import Queues
from scripts.browser import find_browser
from tests.support.console import Chromium, Site
from tests.support.nats_servers import FAST
from tests.support.running_api import fill, on_server


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    home = tmp_path_factory.mktemp("console")
    with EmbeddedServer(home / "nats", FAST) as server:

        async def prepare(queues: Queues) -> None:
            for queue in internal_queues():
                (await queues.ensure(queue)).require_ready()

        on_server(server.address, prepare)
        site = Site(server, home)
        try:
            yield site
        finally:
            site.stop()


@pytest.fixture(autouse=True)
def silence(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test no pipeline publishes its status any more."""
    yield
    if "site" in request.fixturenames:
        request.getfixturevalue("site").fall_silent()


@pytest.fixture(scope="session")
def browser(site: Site) -> Iterator[Chromium]:
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium on this machine: python -m scripts.browser installs it, or says why not")
    with Chromium(path, site.url) as chromium:
        yield chromium


@pytest.fixture
def ox(site: Site, unique: str) -> str:
    """A subscription with thirty messages."""
    name = unique.lower()
    site.subscribe(name)
    fill(site.address, name, range(1, 31))
    return name
