"""A server with a large max_payload, shared by the tests of the bulk path, and a fresh stream name for each."""

from collections.abc import Iterator
from itertools import count

import pytest

from purveyor.jetstream.address import Address
from tests.support.bulk_servers import Server, serving

_NUMBERS = count(1)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("nats"), "max_payload: 9000000\n") as running:
        yield running


@pytest.fixture
def address(server: Server) -> Address:
    return server.address


@pytest.fixture
def name() -> str:
    return f"T{next(_NUMBERS)}"
