"""`purveyor queues permissions` prints a configuration that an external NATS server accepts."""

import asyncio
from pathlib import Path

import pytest

from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.address import Address
from purveyor.model.errors import PermissionDenied
from purveyor.queues.client import connect
from purveyor.queues.permissions import component_users
from tests.support.bulk_servers import serving
from tests.support.command_line import invoke
from tests.support.delivery import definition


def test_a_server_takes_the_printed_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = invoke("queues", "permissions").ok().out
    for user in ("INTAKE", "PIPELINE", "API", "PUSH"):
        monkeypatch.setenv(f"NATS_PASSWORD_{user}", f"s3cret-{user}")
    with serving(tmp_path, printed) as server:
        address = Address.parse(f"nats://api:s3cret-API@127.0.0.1:{server.port}", inbox="_INBOX.api")

        async def work() -> None:
            async with connect(address, patience_seconds=60) as queues:
                await Subscriptions(queues).add(definition("ox"))
                with pytest.raises(PermissionDenied):
                    await queues.streams.get("stream:incoming", 1)

        asyncio.run(work())
        monkeypatch.setenv("PURVEYOR_NATS_URL", f"nats://intake:s3cret-INTAKE@127.0.0.1:{server.port}")
        monkeypatch.setenv("PURVEYOR_NATS_INBOX", "_INBOX.intake")
        Path("people.ldif").write_text("dn: dc=example,dc=org\nobjectClass: domain\ndc: example\n")
        invoke("import", "people.ldif").ok()
        monkeypatch.setenv("PURVEYOR_NATS_INBOX", "_INBOX")
        invoke("import", "people.ldif").refused("may not subscribe")


def test_the_same_as_json(tmp_path: Path) -> None:
    reported = invoke("queues", "permissions", "--json").ok().json
    assert [each["user"] for each in reported] == [each.user for each in component_users()]
    assert all(each["subscribe"]["allow"][0] == f"{each['inbox']}.>" for each in reported)
    (of_one,) = invoke("queues", "permissions", "--subscription", "ox", "--json").ok().json
    assert of_one["subscribe"]["allow"] == ["_INBOX.subscription-ox.>", "ox.main", "ox.prefill", "$KV.acknowledged.ox"]
    assert not any("CONSUMER" in subject for subject in of_one["publish"]["allow"])
    (of_stages,) = invoke("queues", "permissions", "--stages", "--subscription", "ox", "--json").ok().json
    assert of_stages["user"] == "stages"
    assert {"incoming", "incoming.outbox.*.*", "$KV.acknowledged.ox"} <= set(of_stages["publish"]["allow"])
    invoke("queues", "permissions", "--subscription", "incoming").refused("reserved")
    invoke("queues", "permissions", "--subscription", "a.b").refused("invalid subscription name")
