"""The private members of nats-py that `purveyor.jetstream.nats_client` uses still exist, with the same signatures."""

import asyncio
import gc
import inspect
from collections.abc import Callable

import pytest
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.protocol import command

from purveyor.jetstream.address import Address
from purveyor.jetstream.nats_client import NatsClient
from purveyor.queues.client import connect
from tests.support.proxy import TcpProxy
from tests.support.waiting import until

OVERRIDDEN = {
    "_process_msg": ["self", "sid", "subject", "reply", "data", "headers"],
    "_process_headers": ["self", "headers"],
    "_send_publish": ["self", "subject", "reply", "payload", "payload_size", "headers"],
    "_flush_pending": ["self", "force_flush"],
    "_send_ping": ["self", "future"],
    "_connect_to_server": ["self", "s"],
}
CALLED = {
    "_send_command": ["self", "cmd", "priority"],
    "_send_unsubscribe": ["self", "sid", "limit"],
}


def parameters(function: Callable[..., object]) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize(("name", "expected"), [*OVERRIDDEN.items(), *CALLED.items()])
def test_private_methods_of_the_client_keep_their_signature(name: str, expected: list[str]) -> None:
    method = getattr(Client, name)
    assert parameters(method) == expected
    assert inspect.iscoroutinefunction(method)


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_an_override_has_the_parameters_of_the_method_it_replaces(name: str) -> None:
    assert parameters(getattr(NatsClient, name)) == parameters(getattr(Client, name))


def test_our_own_members_do_not_hide_members_of_the_library() -> None:
    ours = vars(NatsClient()).keys() - vars(Client()).keys()
    assert ours == {"_inbox", "_reply_handlers", "_request_count", "_has_inbox", "_write_scheduled"}
    added = {name for name, value in vars(NatsClient).items() if callable(value)} - OVERRIDDEN.keys() - {"__init__"}
    assert not added & set(dir(Client))


def test_private_attributes_of_the_client_have_the_expected_types() -> None:
    client = Client()
    assert client._pending == []
    assert client._pending_data_size == 0
    assert client._server_info == {}
    assert client._transport is None


def test_private_attributes_of_a_subscription_have_the_expected_types() -> None:
    subscription = Subscription(Client(), id=7, subject="orders")
    assert subscription._id == 7
    assert subscription._pending_size == 0
    assert subscription._pending_queue.empty()


def test_a_publish_with_headers_is_one_command() -> None:
    sent = command.hpub_cmd("orders", "inbox", b"NATS/1.0\r\nA: 1\r\n\r\n", b"data")
    assert sent == b"HPUB orders inbox 18 22\r\nNATS/1.0\r\nA: 1\r\n\r\ndata\r\n"


async def test_the_connection_of_a_failed_attempt_is_closed(tcp_proxy: TcpProxy, address: Address) -> None:
    """Else the garbage collector warns of it, in whatever test runs by then."""
    attempts = 0

    async def close_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal attempts
        attempts += 1
        writer.close()

    async with connect(tcp_proxy.address(address)):
        port = tcp_proxy.port
        tcp_proxy.close()
        async with await asyncio.start_server(close_at_once, "127.0.0.1", port):  # another program took the port
            await until(lambda: attempts >= 3)
    gc.collect()  # pytest turns a ResourceWarning about an unclosed connection into an error
