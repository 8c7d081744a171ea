"""A connection reports clear errors and waits for a lost server."""

import asyncio
import contextlib
import dataclasses
import functools
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from purveyor.jetstream.address import Address, Tls
from purveyor.jetstream.config import ConsumerConfig, StreamConfig
from purveyor.jetstream.connection import Connection
from purveyor.jetstream.publisher import Expect
from purveyor.jetstream.server import find_server
from purveyor.model.errors import (
    AuthenticationFailed,
    InvalidHeader,
    InvalidSubject,
    OutcomeUnknown,
    PermissionDenied,
    PublishRefused,
    PurveyorError,
    ServerTooOld,
    ServerUnavailable,
    SetupError,
    UnknownStream,
)
from purveyor.queues.client import Queues, connect
from tests.support.proxy import TcpProxy
from tests.support.scale import pick
from tests.support.waiting import until


async def test_wrong_credentials_fail_at_once_without_showing_them(address: Address) -> None:
    wrong = address.with_password("mallory", "s3cret-guess")
    with pytest.raises(AuthenticationFailed, match="mallory") as failed:
        await Connection.open(wrong, patience_seconds=30)
    assert "s3cret-guess" not in str(failed.value)
    assert "s3cret-guess" not in repr(wrong)


async def test_a_missing_server_is_unavailable_after_the_timeout() -> None:
    with pytest.raises(ServerUnavailable, match=r"127\.0\.0\.1:1"):
        await Connection.open(Address.parse("nats://127.0.0.1:1"), patience_seconds=0.5)


async def test_a_server_that_says_nothing_is_said_to_give_no_answer() -> None:
    """A suspended server accepts connections. The client library gives up an attempt after 5 s, without a text."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address.parse(f"nats://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ServerUnavailable, match=r"\(no answer\)"):
            await Connection.open(address, patience_seconds=7)


@contextlib.asynccontextmanager
async def fake_server(**info: object) -> AsyncIterator[Address]:
    """Serve just enough of the protocol for a client to connect."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        info_fields = {"server_id": "X", "version": "2.15.1", "max_payload": 1024, "headers": True, "proto": 1, **info}
        writer.write(b"INFO " + json.dumps(info_fields).encode() + b"\r\n")
        while line := await reader.readline():
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield Address.parse(f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    finally:
        server.close()


async def test_a_server_too_old_is_refused() -> None:
    async with fake_server(version="2.10.7") as address:
        with pytest.raises(ServerTooOld, match=r"2\.10\.7.*2\.14"):
            await Connection.open(address, patience_seconds=60)


@contextlib.asynccontextmanager
async def bare_server(directory: Path, config: str = "") -> AsyncIterator[Address]:
    """Run a nats-server with its own configuration."""
    file = directory / "nats.conf"
    file.write_text(f'port: -1\nports_file_dir: "{directory}"\n{config}')
    process = await asyncio.create_subprocess_exec(
        str(find_server().path), "-c", str(file), stderr=asyncio.subprocess.DEVNULL
    )

    def ports() -> dict[str, list[str]] | None:
        found = list(directory.glob("*.ports"))
        return json.loads(found[0].read_text()) if found else None

    try:
        found = await until(ports, what="the ports file of nats-server", ignoring=(ValueError,))  # while it is written
        yield Address.parse(found["nats"][0])
    finally:
        process.terminate()
        await process.wait()


async def test_a_server_without_jetstream_is_named(tmp_path: Path) -> None:
    async with bare_server(tmp_path) as where, connect(where, patience_seconds=60) as queues:
        with pytest.raises(SetupError, match="no JetStream"):
            await queues.streams.names()


async def test_a_subject_that_is_not_allowed_is_denied_not_timed_out(tmp_path: Path) -> None:
    config = f"""
        jetstream {{ store_dir: "{tmp_path}/js" }}
        authorization {{ users = [ {{ user: u, password: p,
          permissions: {{ publish: ["$JS.API.STREAM.>"], subscribe: ["_INBOX.>"] }} }} ] }}
    """
    async with (
        bare_server(tmp_path, config) as where,
        connect(where.with_password("u", "p"), patience_seconds=60) as queues,
    ):
        await queues.streams.add(StreamConfig(name="S", subjects=("orders",)))
        with pytest.raises(PermissionDenied, match="publish to 'orders'"):
            await queues.publish("orders", b"x", msg_id="1")
        with pytest.raises(PermissionDenied, match="consumer"):
            await queues.consumers.info("S", "C")
        with pytest.raises(PermissionDenied, match="subscribe to 'orders'"):
            await queues.connection.subscribe("orders", confirm=True)


async def test_bad_messages_are_refused_before_they_are_sent(queues: Queues, unique: str) -> None:
    await queues.streams.add(StreamConfig(name=unique, subjects=(unique,)))
    with pytest.raises(InvalidSubject):
        await queues.publish("a..b", b"")
    with pytest.raises(InvalidHeader):
        await queues.publish(unique, b"", headers={"Bad Name": "x"})
    with pytest.raises(InvalidHeader):
        await queues.publish(unique, b"", headers={"Split": "a\r\nb"})
    with pytest.raises(PublishRefused, match="limit"):
        await queues.publish(unique, bytes(queues.connection.max_payload + 1))
    with pytest.raises(UnknownStream, match=f"{unique}.elsewhere"):
        await queues.publish(f"{unique}.elsewhere", b"")
    with pytest.raises(PurveyorError, match="expected stream"):
        await queues.publish(unique, b"", expect=Expect(stream="OTHER"))


async def test_a_lost_answer_without_an_id_is_an_unknown_outcome(address: Address, unique: str) -> None:
    with TcpProxy(*address.hosts()[0]) as proxy:
        async with connect(proxy.address(address), patience_seconds=60) as queues:
            await queues.streams.add(StreamConfig(name=unique, subjects=(unique,)))
            proxy.freeze()
            with pytest.raises(OutcomeUnknown):
                await queues.publish(unique, b"maybe")
            proxy.restore()
            await queues.publish(unique, b"surely", msg_id="1")


@pytest.mark.chaos
async def test_a_server_outage_is_a_wait_and_nothing_is_lost_or_duplicated(address: Address, unique: str) -> None:
    """Publish with ids and pull in a loop while the server goes away twice."""
    outage, count = pick(2.0, 30.0), 400
    with TcpProxy(*address.hosts()[0]) as proxy:
        through = proxy.address(address)
        async with connect(through, patience_seconds=100) as queues, connect(through, patience_seconds=100) as other:
            await queues.streams.add(StreamConfig(name=unique, subjects=(unique,)))
            await queues.consumers.add(unique, ConsumerConfig(durable_name="C"))
            got: list[tuple[int, int]] = []

            async def publish() -> None:
                for number in range(count):
                    await queues.publish(unique, str(number).encode(), msg_id=str(number))

            async def consume() -> None:
                async with contextlib.aclosing(other.pull(unique, "C")) as messages:
                    async for message in messages:
                        await message.ack(confirm=True)
                        got.append((message.sequence, int(message.data)))
                        if len({sequence for sequence, _ in got}) == count:
                            return

            async def interrupt() -> None:
                for reached in (count // 4, count // 2):
                    await until(functools.partial(lambda count: len(got) >= count, reached), seconds=200)
                    proxy.refuse()
                    await asyncio.sleep(outage)
                    proxy.restore()

            async with asyncio.TaskGroup() as group:
                for work in (publish(), consume(), interrupt()):
                    group.create_task(work)
            state = (await queues.streams.info(unique)).state
            assert (state.messages, state.last_seq) == (count, count)
            assert sorted(set(got)) == [(number + 1, number) for number in range(count)]


async def test_tls_files_that_are_missing_or_broken_are_named(tmp_path: Path) -> None:
    missing = Address.parse("tls://127.0.0.1:1", tls=Tls(ca=tmp_path / "none.pem"))
    with pytest.raises(SetupError, match=r"none\.pem"):
        await Connection.open(missing, patience_seconds=1)
    broken = tmp_path / "broken.pem"
    broken.write_text("not a certificate")
    with pytest.raises(SetupError, match="PEM"):
        await Connection.open(dataclasses.replace(missing, tls=Tls(ca=broken)), patience_seconds=1)


@pytest.mark.parametrize("url", ["http://x", "nats://", "nats://h:port", "nats://u:p@ss@"])
def test_an_invalid_address_is_refused_without_showing_its_secret(url: str) -> None:
    with pytest.raises(PurveyorError) as refused:
        Address.parse(url)
    assert "p@ss" not in str(refused.value)


def test_an_address_is_parsed() -> None:
    address = Address.parse("nats://ada:s%3A3@h1,tls://[::1]:5222")
    assert address.urls == ("nats://h1:4222", "tls://[::1]:5222")
    assert (address.user, address.password) == ("ada", "s:3")
    assert address.hosts() == [("h1", 4222), ("::1", 5222)]
    assert "s:3" not in repr(address)
    assert Address.parse("token@h").token == "token"


async def test_a_message_whose_id_is_in_process_is_sent_again(queues: Queues, unique: str) -> None:
    """After the loss of a stream's leader, a message sent before is neither stored yet nor forgotten."""
    answers = [b'{"error":{"code":409,"err_code":10158,"description":"duplicate message id is in process"}}'] * 2
    answers.append(b'{"stream":"S","seq":7,"duplicate":true}')
    stream = await queues.connection.subscribe(unique, confirm=True)

    async def answer() -> None:
        for each in answers:
            asked = await stream.next(60)
            assert asked is not None
            await queues.connection.publish(asked.reply, each)

    answering = asyncio.create_task(answer())
    assert await queues.publish(unique, b"x", msg_id="a") == ("S", 7, True)
    await answering
    await stream.close()


async def test_a_cancellation_is_kept_while_the_connection_is_closing(address: Address) -> None:
    """nats-py reports it as a closed connection, and a loop that follows a subject would retry."""
    connection = await Connection.open(address)
    listening = await connection.subscribe("nothing.comes.here")
    waiting = asyncio.create_task(listening.next(60))
    await asyncio.sleep(0.05)
    closing = asyncio.create_task(connection._client.close())
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await closing


@pytest.mark.parametrize("size", [10, 900_000], ids=["small", "large"])
async def test_a_flush_confirms_what_was_sent_before_it(address: Address, size: int, unique: str) -> None:
    sender = await Connection.open(address, patience_seconds=30)
    receiver = await Connection.open(address, patience_seconds=30)
    async with sender, receiver:
        subscription = await receiver.subscribe(unique, confirm=True)
        for number in range(50):
            await sender.publish(unique, b"%d" % number + bytes(size))
            await sender.flush()
            await receiver.flush()
            assert [answer.subject for answer in subscription.drain()] == [unique], f"message {number}"
