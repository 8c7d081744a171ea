"""Bulk connections: TLS, every kind of credentials, permanent errors at once, and no secret in an error."""

import base64
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import nkeys
import pytest

from purveyor.jetstream.address import Address, Tls
from purveyor.jetstream.bulk import close_idle, outgoing, publish_many, read_range
from purveyor.jetstream.bulk.net.pool import RetryDeadline, connect, parse_key_file, release
from purveyor.model.errors import AuthenticationFailed, NoAnswer, ServerTooOld, SetupError, UnknownStream
from tests.support.bulk_messages import numbered
from tests.support.bulk_servers import Server, connected, make_stream, request_api, serving
from tests.support.certificates import Authority

SECRET = "s3cret-w0rd"


def works(address: Address) -> bool:
    make_stream(address, "S")
    stored = publish_many(address, outgoing(numbered("S.a", 10))).stored
    return stored == 10 and sum(int(batch.num_rows) for batch in read_range(address, "S", 1, 10)) == 10


def make_key(prefix: int) -> Any:
    return nkeys.from_seed(bytearray(nkeys.encode_seed(os.urandom(32), prefix)))


def test_user_and_password(tmp_path: Path) -> None:
    with serving(tmp_path, f"authorization {{ user: ada, password: {SECRET} }}") as server:
        assert works(server.address.with_password("ada", SECRET))
        for wrong in (server.address, server.address.with_password("ada", SECRET + "x")):
            with pytest.raises(AuthenticationFailed) as refused:
                publish_many(wrong, outgoing(numbered("S.a", 1)))
            assert SECRET not in str(refused.value) + repr(refused.value) + repr(refused.value.__cause__)
            assert refused.value.fix


def test_token(tmp_path: Path) -> None:
    with serving(tmp_path, f"authorization {{ token: {SECRET} }}") as server:
        assert works(replace(server.address, token=SECRET))
        with pytest.raises(AuthenticationFailed):
            list(read_range(replace(server.address, token="wrong"), "S", 1, 2))


def test_nkey_seed_file(tmp_path: Path) -> None:
    pair, other = make_key(nkeys.PREFIX_BYTE_USER), make_key(nkeys.PREFIX_BYTE_USER)
    (tmp_path / "seed").write_bytes(pair.seed)
    (tmp_path / "other").write_bytes(b"\n" + other.seed + b"\n")
    config = f"authorization {{ users: [ {{ nkey: {pair.public_key.decode()} }} ] }}"
    with serving(tmp_path, config) as server:
        assert works(replace(server.address, credentials=tmp_path / "seed"))
        with pytest.raises(AuthenticationFailed):
            publish_many(replace(server.address, credentials=tmp_path / "other"), outgoing(numbered("S.a", 1)))


def jwt(claims: dict[str, Any], signer: Any) -> str:
    """Return a NATS JWT: ed25519 over header and claims, with a hash of the claims as its id."""

    def encode(data: bytes) -> str:
        return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

    digest = hashlib.new("sha512_256", json.dumps(claims).encode()).digest()
    claims = {**claims, "jti": base64.b32encode(digest).rstrip(b"=").decode()}
    head = encode(json.dumps({"typ": "JWT", "alg": "ed25519-nkey"}).encode())
    body = encode(json.dumps(claims).encode())
    return f"{head}.{body}.{encode(signer.sign(f'{head}.{body}'.encode()))}"


def claims_for(kind: str, subject: Any, issuer: Any, nats: dict[str, Any]) -> dict[str, Any]:
    return {
        "iat": int(time.time()),
        "iss": issuer.public_key.decode(),
        "name": kind,
        "sub": subject.public_key.decode(),
        "nats": {"type": kind, "version": 2, **nats},
    }


def test_creds_file_with_jwt(tmp_path: Path) -> None:
    operator, account = make_key(nkeys.PREFIX_BYTE_OPERATOR), make_key(nkeys.PREFIX_BYTE_ACCOUNT)
    user = make_key(nkeys.PREFIX_BYTE_USER)
    everything = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1)
    storage = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1)
    limits = {"limits": {**everything, "wildcards": True, **storage}}
    operator_jwt = jwt(claims_for("operator", operator, operator, {}), operator)
    account_jwt = jwt(claims_for("account", account, operator, limits), operator)
    unlimited = {"subs": -1, "data": -1, "payload": -1, "pub": {}, "sub": {}}
    user_jwt = jwt(claims_for("user", user, account, unlimited), account)
    public = account.public_key.decode()
    system = make_key(nkeys.PREFIX_BYTE_ACCOUNT)
    preloaded = {
        public: account_jwt,
        system.public_key.decode(): jwt(claims_for("account", system, operator, {}), operator),
    }
    config = f"operator: {operator_jwt}\nsystem_account: {system.public_key.decode()}\nresolver: MEMORY\n"
    config += "resolver_preload: {\n" + "\n".join(f"{key}: {value}" for key, value in preloaded.items()) + "\n}\n"
    creds = tmp_path / "user.creds"
    creds.write_text(
        f"-----BEGIN NATS USER JWT-----\n{user_jwt}\n------END NATS USER JWT------\n\nsome words\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
    )
    with serving(tmp_path, config) as server:
        assert works(replace(server.address, credentials=creds))
        creds.write_text(creds.read_text().replace(user.seed.decode(), make_key(nkeys.PREFIX_BYTE_USER).seed.decode()))
        close_idle()
        with pytest.raises(AuthenticationFailed):
            publish_many(replace(server.address, credentials=creds), outgoing(numbered("S.a", 1)))


def test_a_damaged_credentials_file_is_reported_without_its_content(tmp_path: Path) -> None:
    seed = make_key(nkeys.PREFIX_BYTE_USER).seed
    damaged = seed[:-3] + (b"AAA" if seed[-3:] != b"AAA" else b"BBB")
    for content in (b"", b"nonsense", seed[:20], damaged, make_key(nkeys.PREFIX_BYTE_ACCOUNT).seed):
        with pytest.raises(SetupError, match="the-file") as refused:
            parse_key_file(content, Path("the-file"))
        error: BaseException | None = refused.value
        shown = ""
        while error is not None:
            shown += str(error) + repr(error)
            error = error.__cause__
        assert not content or content.decode() not in shown
    assert SECRET not in repr(parse_key_file(seed, Path("x")))
    assert seed.decode() not in repr(parse_key_file(seed, Path("x")))


def tls_config(directory: Path, more: str = "") -> str:
    """Return a server configuration with certificates for server and clients from one authority."""
    authority = Authority(directory)
    authority.issue("server")
    authority.issue("client")
    files = f'cert_file: "{directory}/server.pem"\nkey_file: "{directory}/server.key"\nca_file: "{directory}/ca.pem"'
    return f"authorization {{ user: ada, password: {SECRET} }}\ntls {{\n{files}\n{more}\n}}\n"


@pytest.mark.parametrize("first", [False, True])
def test_tls_with_user_and_password(tmp_path: Path, first: bool) -> None:
    with serving(tmp_path, tls_config(tmp_path, "handshake_first: true" if first else "")) as server:
        plain = server.address.with_password("ada", SECRET)
        address = replace(plain, tls=Tls(ca=tmp_path / "ca.pem", first=first))
        assert works(address)
        body = os.urandom(500_000)
        publish_many(address, outgoing(("S.b", body, None, None) for _ in range(40)))
        found = [row for batch in read_range(address, "S", 11, 50) for row in batch.to_pylist()]
        assert [row["data"] for row in found] == [body] * 40
        with pytest.raises(SetupError, match="not trusted"):
            publish_many(replace(plain, tls=Tls(first=first)), outgoing(numbered("S.a", 1)))
        wrong_name = Tls(ca=tmp_path / "ca.pem", first=first, hostname="elsewhere")
        with pytest.raises(SetupError, match="not trusted"):
            publish_many(replace(plain, tls=wrong_name), outgoing(numbered("S.a", 1)))
        with pytest.raises(AuthenticationFailed):
            publish_many(replace(address, password="wrong"), outgoing(numbered("S.a", 1)))


def test_tls_with_a_client_certificate(tmp_path: Path) -> None:
    with serving(tmp_path, tls_config(tmp_path, "verify: true")) as server:
        plain = server.address.with_password("ada", SECRET)
        client = Tls(ca=tmp_path / "ca.pem", certificate=tmp_path / "client.pem", key=tmp_path / "client.key")
        assert works(replace(plain, tls=client))
        with pytest.raises(AuthenticationFailed, match="client certificate"):
            publish_many(replace(plain, tls=Tls(ca=tmp_path / "ca.pem")), outgoing(numbered("S.a", 1)))


def test_tls_is_never_given_up_for_plain_text(server: Server) -> None:
    with pytest.raises(SetupError, match="offers no TLS"):
        publish_many(replace(server.address, tls=Tls()), outgoing(numbered("S.a", 1)))


@contextmanager
def greeting(line: bytes) -> Iterator[Address]:
    """Serve one line to every client that connects."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                client.sendall(line)
                client.recv(10)

        thread = threading.Thread(target=serve)
        thread.start()
        yield Address((f"nats://127.0.0.1:{listener.getsockname()[1]}",))
        thread.join()


def test_a_server_too_old_is_reported_at_once() -> None:
    with (
        greeting(b'INFO {"server_id":"x","version":"2.10.4","max_payload":1048576}\r\n') as address,
        pytest.raises(ServerTooOld, match=r"2\.10\.4.*2\.14"),
    ):
        publish_many(address, outgoing(numbered("a", 1)))


def test_another_service_on_the_port_is_reported_at_once() -> None:
    with greeting(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address, pytest.raises(SetupError, match="not a NATS server"):
        publish_many(address, outgoing(numbered("a", 1)))


def test_a_request_returns_a_reply_or_a_reason(server: Server) -> None:
    with connected(server.address) as connection:
        with pytest.raises(UnknownStream, match="nothing-here"):
            connection.request_api("STREAM.INFO.nothing-here")
        assert connection.request("without.subscriber").status == 503
        connection.subscribe("silence")
        with pytest.raises(NoAnswer, match="silence"):
            connection.request("silence", timeout=0.1)
        assert connection.request_api("INFO")["streams"] >= 0


def test_idle_connections_are_reused_and_dead_ones_are_not(tmp_path: Path) -> None:
    close_idle()
    with serving(tmp_path) as server:
        first = connect(server.address, RetryDeadline(60))
        release(server.address, first)
        again = connect(server.address, RetryDeadline(60))
        assert again is first
        other = connect(server.address, RetryDeadline(60))
        assert other is not first
        release(server.address, again)
        release(server.address, other)
        server.stop()
        server.start()
        fresh = connect(server.address, RetryDeadline(60))
        assert fresh not in (first, other)
        assert fresh.request_api("INFO")["streams"] == 0
        fresh.close()


def test_disabled_jetstream_is_reported(tmp_path: Path) -> None:
    accounts = (
        "accounts { A: { users: [{ user: a, password: a }] }, B: { jetstream: on, users: [{ user: b, password: b }] } }"
    )
    with serving(tmp_path, accounts) as server, pytest.raises(SetupError, match="JetStream"):
        request_api(server.address.with_password("a", "a"), "INFO")
