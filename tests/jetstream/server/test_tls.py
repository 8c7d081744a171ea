"""The embedded server speaks TLS if it is given a certificate, to both clients, and then nothing else."""

import dataclasses
import re
import ssl
import subprocess
from pathlib import Path

import pytest

from purveyor.jetstream import ServerOptions, outgoing, publish_many
from purveyor.jetstream.address import Address
from purveyor.jetstream.config import StreamConfig
from purveyor.jetstream.server import ServerTls, find_running_server
from purveyor.jetstream.server.config import Permissions
from purveyor.model.errors import InvalidConfig, SetupError
from purveyor.queues.client import connect
from tests.support.certificates import Authority, self_signed
from tests.support.nats_servers import FAST, OwnServer


async def both_work(address: Address, stream: str) -> None:
    async with connect(address, patience_seconds=60) as queues:
        await queues.streams.add(StreamConfig(name=stream, subjects=(stream,)))
        assert (await queues.publish(stream, b"one", msg_id="1")).sequence == 1
    assert publish_many(address, outgoing([(stream, b"two", None, "2")])).stored == 1


READER = Permissions(user="reader", purpose="reads a stream", publish=("$JS.API.STREAM.INFO.>",))


async def test_everyone_speaks_tls_with_it(tmp_path: Path, own_server: OwnServer) -> None:
    cert, key = self_signed(tmp_path, "nats")
    server = own_server(ServerOptions(sync=FAST.sync, tls=ServerTls(certificate=cert, key=key)))
    found = find_running_server(server.directory)
    assert found == server.address
    await both_work(server.address, "S")
    plain = dataclasses.replace(server.address, tls=None)
    with pytest.raises(SetupError, match="not trusted"):
        publish_many(plain, outgoing([("S", b"x", None, "3")]))


async def test_a_certificate_for_another_name_needs_that_name(tmp_path: Path, own_server: OwnServer) -> None:
    cert, key = self_signed(tmp_path, "nats", "DNS:nats.example")
    tls = ServerTls(certificate=cert, key=key, ca=cert, hostname="nats.example")
    server = own_server(ServerOptions(sync=FAST.sync, tls=tls, users=(READER,)))
    await both_work(server.address, "S")
    of_component = find_running_server(server.directory, READER.user)
    assert of_component is not None
    assert of_component.tls == server.address.tls


def handshake(ca: Path, cert: Path, key: Path, name: str) -> None:
    """Verify a certificate as Python 3.13 does, on any Python."""
    client = ssl.create_default_context(cafile=ca)
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(cert, key)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    while sides:
        for side in tuple(sides):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            sides.remove(side)


@pytest.mark.parametrize("name", ["nats.example", "127.0.0.1"])
def test_certificates_made_as_the_guide_says_pass_a_strict_verification(tmp_path: Path, name: str) -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "running.md").read_text()
    (recipe,) = re.findall(r"^```sh\n(openssl req .*?)^```", guide, re.DOTALL | re.MULTILINE)
    done = subprocess.run(["/bin/sh", "-ec", recipe], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("server.pem: OK\n")
    handshake(tmp_path / "ca.pem", tmp_path / "server.pem", tmp_path / "server.key", name)


def test_certificates_of_tests_pass_a_strict_verification(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    handshake(authority.certificate, *authority.issue("server"), "localhost")
    cert, key = self_signed(tmp_path, "alone")
    handshake(cert, cert, key, "127.0.0.1")


def test_files_that_do_not_fit_are_refused_at_once(tmp_path: Path) -> None:
    cert, _ = self_signed(tmp_path, "one")
    _, key = self_signed(tmp_path, "two")
    with pytest.raises(InvalidConfig, match=r"one\.pem"):
        ServerTls(certificate=cert, key=key)
    with pytest.raises(InvalidConfig, match=r"none\.pem"):
        ServerTls(certificate=tmp_path / "none.pem", key=key)
