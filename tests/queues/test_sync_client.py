"""The synchronous front runs the asynchronous code on one connection, which ends when it is idle."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from purveyor.jetstream.address import Address
from purveyor.jetstream.server.server_checks import free_port
from purveyor.model.errors import ServerUnavailable, UnknownStream
from purveyor.queues import sync_client
from purveyor.queues.client import Queues
from purveyor.queues.sync_client import run_sync
from tests.support.nats_servers import OwnServer
from tests.support.waiting import wait_until


async def _connection_id(queues: Queues) -> int:
    return id(queues.connection)


def test_many_threads_share_one_connection(address: Address) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: run_sync(address, _connection_id), range(50)))
    assert len(found) == 1


def test_an_idle_connection_is_closed_and_the_next_call_opens_another(
    own_server: OwnServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_client, "_IDLE_SECONDS", 0.1)
    address = own_server().address
    run_sync(address, _connection_id)
    wait_until(lambda: not any(key[1] == address for key in sync_client._sessions))
    run_sync(address, _connection_id)


def test_an_error_of_the_work_is_raised_and_the_connection_stays(address: Address) -> None:
    first = run_sync(address, _connection_id)
    with pytest.raises(UnknownStream):
        run_sync(address, lambda queues: queues.streams.info("no-such-stream"))
    assert run_sync(address, _connection_id) == first


def test_a_server_that_cannot_be_reached_is_an_error_and_leaves_no_session() -> None:
    address = Address((f"nats://127.0.0.1:{free_port('127.0.0.1')}",))
    for _ in range(2):
        with pytest.raises(ServerUnavailable):
            run_sync(address, _connection_id, 0.1)
    assert not any(key[1] == address for key in sync_client._sessions)
