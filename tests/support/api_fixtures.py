"""Fixtures: the API of this worker and its clients."""

from collections.abc import Iterator

import httpx
import pytest

from purveyor.jetstream.server import EmbeddedServer
from tests.support.running_api import Consumer, RunningApi, subscribe


@pytest.fixture(scope="session")
def running_api(nats_server: EmbeddedServer) -> Iterator[RunningApi]:
    with RunningApi(lambda: nats_server.address) as api:
        yield api.when_ready()


@pytest.fixture
def api(running_api: RunningApi) -> RunningApi:
    return running_api


@pytest.fixture(scope="session")
def admin(running_api: RunningApi) -> httpx.Client:
    return running_api.client("admin", "admin-secret")


@pytest.fixture(scope="session")
def events(running_api: RunningApi) -> httpx.Client:
    return running_api.client("events", "events-secret")


@pytest.fixture
def name(unique: str) -> str:
    return unique


@pytest.fixture
def consumer(api: RunningApi, admin: httpx.Client, name: str) -> Consumer:
    """A new subscription."""
    return subscribe(api, admin, name)
