"""The client against servers that misbehave: silence, rubbish, notices, late responses; and its settings."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest

from purveyor.model.errors import InvalidConfig, PurveyorError
from purveyor.sources.ldap.ber import encode_integer, encode_octets, encode_sequence
from purveyor.sources.ldap.directory import DirectoryAddress
from purveyor.sources.ldap.ldap_client import LdapClient, connect
from purveyor.sources.ldap.ldap_errors import (
    CertificateRefused,
    DirectoryRefused,
    DirectoryUnavailable,
    EncryptionRequired,
    FollowEnded,
    NotUnderstood,
)
from purveyor.sources.ldap.ldap_messages import NOTICE_OF_DISCONNECTION, Scope
from purveyor.sources.ldap.sync_consumer import EntriesDeleted, RefreshBegan, RefreshEnded, SyncChange

PASSWORD = "very secret"
bound = partial(DirectoryAddress, bind_dn="cn=a", password=PASSWORD)
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

UUID = bytes(range(16))
SYNC_INFO, SYNC_STATE = "1.3.6.1.4.1.4203.1.9.1.4", "1.3.6.1.4.1.4203.1.9.1.2"


def result(message_id: int, tag: int, code: int = 0, *more: bytes) -> bytes:
    parts = (encode_integer(code, tag=0x0A), encode_octets(""), encode_octets("because"), *more)
    return encode_sequence(encode_integer(message_id), encode_sequence(*parts, tag=tag))


def notice(code: int) -> bytes:
    return result(0, 0x78, code, encode_octets(NOTICE_OF_DISCONNECTION, tag=0x8A))


def sync_info(message_id: int, value: bytes) -> bytes:
    response = encode_sequence(encode_octets(SYNC_INFO, tag=0x80), encode_octets(value, tag=0x81), tag=0x79)
    return encode_sequence(encode_integer(message_id), response)


REFRESH_DONE = encode_sequence(tag=0xA1)
DELETED = encode_sequence(b"\x01\x01\xff", encode_sequence(encode_octets(UUID), tag=0x31), tag=0xA3)


@asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[str]:
    """Serve connections with a function; its URI."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer)
            await reader.read()
        except ConnectionError:
            pass
        finally:
            writer.close()

    running = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with running:
        yield f"ldap://127.0.0.1:{running.sockets[0].getsockname()[1]}"


async def read_request(reader: asyncio.StreamReader) -> None:
    """Read one request; those of these tests have less than 128 bytes."""
    _, length = await reader.readexactly(2)
    await reader.readexactly(length)


def saying(*answers: bytes) -> Answer:
    """Answer each request with the next bytes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for each in answers:
            await read_request(reader)
            writer.write(each)

    return answer


async def collect(changes: AsyncGenerator[SyncChange, None]) -> tuple[list[SyncChange], PurveyorError]:
    """Return the changes before an error, and the error."""
    found: list[SyncChange] = []
    try:
        async for change in changes:
            found.append(change)  # noqa: PERF401 # what came before the error is kept
    except PurveyorError as error:
        return found, error
    raise AssertionError("the changes ended without an error")


async def test_a_server_that_says_nothing_is_given_up() -> None:
    async with server(saying()) as uri:
        with pytest.raises(DirectoryUnavailable, match="does not answer within"):
            async with connect(bound(uri, connect_seconds=0.05)):
                pass
        async with connect(DirectoryAddress(uri, response_seconds=0.05)) as client:
            with pytest.raises(DirectoryUnavailable, match="no answer of"):
                await client.search("dc=x")


async def test_a_port_where_nothing_listens_is_retryable() -> None:
    with pytest.raises(DirectoryUnavailable, match=r"cannot connect to ldap://127\.0\.0\.1:1"):
        async with connect(DirectoryAddress("ldap://127.0.0.1:1")):
            pass


@pytest.mark.parametrize(
    "rubbish", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"0\x80\x00\x00", b"0\x84\xff\xff\xff\xff", b"0\x02\x05\x00"]
)
async def test_what_is_not_ldap_is_said_so(rubbish: bytes) -> None:
    async with server(saying(rubbish)) as uri:
        with pytest.raises(NotUnderstood, match="not LDAP"):
            async with connect(bound(uri)):
                pass


async def test_a_message_above_the_limit_is_refused_before_it_arrives() -> None:
    async with server(saying(b"0\x84\x7f\xff\xff\xff")) as uri, connect(DirectoryAddress(uri)) as client:
        with pytest.raises(NotUnderstood, match="at most"):
            await client.search("dc=x")


async def test_a_notice_of_disconnection_is_retryable_and_says_why() -> None:
    async with server(saying(notice(52))) as uri, connect(DirectoryAddress(uri)) as client:
        with pytest.raises(DirectoryUnavailable, match=r"shutting down.*because") as caught:
            await client.search("dc=x")
        assert caught.value.code == 52
        with pytest.raises(DirectoryUnavailable, match="lost"):
            await client.search("dc=x")
    async with server(saying(notice(8))) as uri, connect(DirectoryAddress(uri)) as client:
        with pytest.raises(EncryptionRequired, match="StartTLS"):
            await client.search("dc=x")


async def test_a_connection_that_breaks_in_a_message_is_lost() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(result(1, 0x65)[:5])
        writer.close()

    async with server(answer) as uri, connect(DirectoryAddress(uri)) as client:
        with pytest.raises(DirectoryUnavailable, match="is lost"):
            await client.search("dc=x")


async def test_changes_before_the_end_of_a_connection_are_given_out() -> None:
    """With the answer, the change and the notice in one packet."""
    base = result(1, 0x65)
    messages = sync_info(2, REFRESH_DONE) + sync_info(2, DELETED) + notice(52) + sync_info(2, DELETED)
    async with server(saying(base, messages)) as uri, connect(DirectoryAddress(uri)) as client:
        found, error = await collect(client.follow("dc=x"))
    assert found == [
        RefreshBegan(full=True),
        RefreshEnded(remove_unseen=True, cookie=None),
        EntriesDeleted(("00010203-0405-0607-0809-0a0b0c0d0e0f",)),
    ]
    assert isinstance(error, DirectoryUnavailable)


async def test_a_synchronisation_that_the_server_ends_is_an_error() -> None:
    messages = sync_info(2, REFRESH_DONE) + result(2, 0x65)
    async with server(saying(result(1, 0x65), messages)) as uri, connect(DirectoryAddress(uri)) as client:
        found, error = await collect(client.follow("dc=x"))
    assert len(found) == 2
    assert isinstance(error, FollowEnded)
    assert error.retryable


async def test_a_broken_value_inside_of_a_message_is_not_understood() -> None:
    messages = sync_info(2, REFRESH_DONE) + sync_info(2, b"\x30\x00")
    async with server(saying(result(1, 0x65), messages)) as uri, connect(DirectoryAddress(uri)) as client:
        found, error = await collect(client.follow("dc=x"))
    assert len(found) == 2
    assert isinstance(error, NotUnderstood)


async def test_responses_to_an_abandoned_search_are_skipped() -> None:
    late = sync_info(2, DELETED) + result(2, 0x65)
    async with (
        server(saying(result(1, 0x65), sync_info(2, REFRESH_DONE), b"", late + result(4, 0x65))) as uri,
        connect(DirectoryAddress(uri)) as client,
    ):
        changes = client.follow("dc=x")
        assert isinstance(await anext(changes), RefreshBegan)
        await changes.aclose()  # sends an abandon
        assert await client.search("dc=x", scope=Scope.BASE) == []


async def test_a_slow_caller_stops_the_server() -> None:
    """The server cannot send more than the buffers of the system and about a megabyte."""
    sent, blocked, total = 0, asyncio.Event(), 2000  # 120 MB

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await read_request(reader)
        writer.write(result(1, 0x65))
        await read_request(reader)
        entry = encode_sequence(encode_octets("cn=a"), encode_sequence(), tag=0x64)
        state = encode_sequence(b"\x0a\x01\x01", encode_octets(UUID))
        padding = encode_sequence(encode_octets("1.2"), encode_octets(bytes(60_000)))
        control = encode_sequence(encode_octets(SYNC_STATE), encode_octets(state))
        message = encode_sequence(encode_integer(2), entry, encode_sequence(control, padding, tag=0xA0))
        for _ in range(total):
            writer.write(message)
            sent += 1
            try:
                await asyncio.wait_for(writer.drain(), 0.3)
            except TimeoutError:
                break
        blocked.set()

    async with server(flood) as uri, connect(DirectoryAddress(uri)) as client:
        changes = client.follow("dc=x")
        assert isinstance(await anext(changes), RefreshBegan)
        await blocked.wait()
        assert sent < total / 2
        await changes.aclose()


def test_a_password_is_never_shown() -> None:
    address = bound("ldap://127.0.0.1")
    assert PASSWORD not in repr(address)
    assert PASSWORD not in str(address)


async def test_a_password_is_in_no_error() -> None:
    async with server(saying(result(1, 0x61, 49))) as uri:
        with pytest.raises(DirectoryRefused) as caught:
            async with connect(bound(uri)) as client:
                assert PASSWORD not in repr(client)
        assert PASSWORD not in str(caught.value)
        assert "cn=a" in str(caught.value)


async def test_start_tls_that_the_server_refuses_ends_the_connection() -> None:
    async with server(saying(result(1, 0x78, 2))) as uri:
        with pytest.raises(DirectoryRefused, match="StartTLS"):
            async with connect(bound(uri, start_tls=True)):
                pass


async def test_bytes_before_the_handshake_are_refused() -> None:
    """An attacker who adds responses in clear must not have them taken for those of the server."""
    async with server(saying(result(1, 0x78) + result(2, 0x61))) as uri:
        with pytest.raises(PurveyorError, match="between its consent"):
            async with connect(bound(uri, start_tls=True)):
                pass


async def test_tls_to_a_port_without_tls_is_explained() -> None:
    async with server(saying(b"no tls here\r\n")) as uri:
        with pytest.raises(CertificateRefused, match="port speaks TLS"):
            async with connect(DirectoryAddress(uri.replace("ldap", "ldaps"))):
                pass


@pytest.mark.parametrize(
    ("uri", "settings", "reason"),
    [
        ("http://a", {}, "invalid LDAP URI"),
        ("ldap://", {}, "invalid LDAP URI"),
        ("ldap://a:x", {}, "invalid LDAP URI"),
        ("ldap://a/dc=x??sub", {}, "invalid LDAP URI"),
        ("ldap://me:hunter2@a", {}, "invalid LDAP URI"),
        ("ldaps://a", {"start_tls": True}, "StartTLS"),
        ("ldap://a", {"bind_dn": "cn=a"}, "no password"),
    ],
)
def test_settings_that_make_no_sense_are_refused(uri: str, settings: dict[str, object], reason: str) -> None:
    with pytest.raises(InvalidConfig, match=reason) as caught:
        DirectoryAddress(uri, **settings)  # type: ignore[arg-type]  # settings of several types
    assert "hunter2" not in str(caught.value)


def test_ports_follow_from_the_scheme() -> None:
    assert DirectoryAddress("ldap://a").host_and_port() == ("ldap", "a", 389)
    assert DirectoryAddress("LDAPS://[::1]/").host_and_port() == ("ldaps", "::1", 636)
    assert isinstance(LdapClient, type)
