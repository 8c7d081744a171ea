import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from purveyor.jetstream.address import Address
from purveyor.queues.client import Queues
from purveyor.sources.ldap.source_store import SourceStore
from tests.support.command_line import Outcome, invoke, url_of
from tests.support.serve_ldap import ServeLdap
from tests.support.slapd import READER_DN, READER_PASSWORD, SUFFIX, Slapd, require_slapd
from tests.support.source_harness import SourceHarness
from tests.support.waiting import until

require_slapd_once = pytest.fixture(scope="module", autouse=True)(require_slapd)
Start = Callable[..., ServeLdap]


@pytest.fixture(scope="module")
def slapd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slapd]:
    with Slapd(tmp_path_factory.mktemp("slapd")) as server:
        server.add_base()
        yield server


@pytest.fixture
def start(tmp_path: Path, address: Address, slapd: Slapd) -> Iterator[Start]:
    """Starts `purveyor serve ldap` with the directory in its environment."""
    started: list[ServeLdap] = []

    def begin(source: str, *arguments: str, **environment: str) -> ServeLdap:
        given = {
            "PURVEYOR_NATS_URL": url_of(address),
            "PURVEYOR_NATS_INBOX": address.inbox,
            "PURVEYOR_LDAP_URI": slapd.uri,
            "PURVEYOR_LDAP_BASE": SUFFIX,
            "PURVEYOR_LDAP_BIND_DN": READER_DN,
            "PURVEYOR_LDAP_PASSWORD": READER_PASSWORD,
            "PURVEYOR_LDAP_SOURCE": source,
        }
        started.append(ServeLdap(tmp_path / "data", *arguments, environment=given | environment))
        return started[-1]

    yield begin
    for process in started:
        process.close()


async def test_it_follows_the_directory_until_a_signal(start: Start, slapd: Slapd, queues: Queues, unique: str) -> None:
    harness = SourceHarness.of(queues, slapd, unique)
    process = start(unique, "--metrics-port", "0")
    ready = process.wait_for("ready")
    assert unique in ready["detail"]
    following = process.wait_for("following")
    assert (following["source"], following["entries"]) == (unique, 3)
    assert (await harness.until_copy(lambda copy: len(copy.entries) == 3)).dns >= {SUFFIX, READER_DN}
    assert READER_PASSWORD not in process.command_line()
    assert process.stop(signal.SIGINT) == 0
    assert process.events[-1]["event"] == "stopped"
    assert process.err() == ""
    assert READER_PASSWORD not in str(process.events) + str(await harness.records())
    assert "userPassword" not in str(await harness.records())


async def test_the_sources_are_listed_shown_and_refreshed(
    start: Start, queues: Queues, unique: str, address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PURVEYOR_NATS_URL", url_of(address))
    monkeypatch.setenv("PURVEYOR_NATS_INBOX", address.inbox)
    store = await SourceStore.open(queues)
    process = start(unique)
    process.wait_for("following")
    await until(lambda: store.state(unique))

    def listed() -> dict[str, object]:
        reports = invoke("source", "list", "--json").ok().json
        return next((each for each in reports if each["source"] == unique), {})

    def command(*words: str) -> Outcome:
        return invoke("source", *words)

    await until(lambda: asyncio.to_thread(lambda: listed().get("state") == "following"))
    found = await asyncio.to_thread(command, "show", unique)
    assert "dc=example,dc=org" in found.ok().out
    assert unique in (await asyncio.to_thread(command, "list")).ok().out
    (await asyncio.to_thread(command, "refresh", unique, "--yes")).ok()
    process.wait_for("following", times=2)
    await until(lambda: store.state(unique))
    process.stop()
    assert (await asyncio.to_thread(listed))["state"] == "not running"
    (await asyncio.to_thread(command, "show", f"{unique}-other")).refused("no process follows")
    (await asyncio.to_thread(command, "refresh", f"{unique}-other", "--yes")).refused("has no stored cookie")


async def test_options_override_the_environment(
    start: Start, slapd: Slapd, queues: Queues, unique: str, tmp_path: Path
) -> None:
    password = tmp_path / "password"
    password.write_text(f"{READER_PASSWORD}\n")
    flags = ("--uri", slapd.uri, "--base", READER_DN, "--bind-dn", READER_DN, "--password-file", str(password))
    process = start("unused", *flags, "--source", unique, "--filter", "(cn=*)", PURVEYOR_LDAP_PASSWORD="")
    assert process.wait_for("following")["entries"] == 1
    assert process.stop() == 0


async def test_a_process_killed_after_the_queue_had_records_and_before_the_cookie_loses_nothing(
    start: Start, slapd: Slapd, queues: Queues, unique: str
) -> None:
    base = f"ou={unique},{SUFFIX}"
    people: list[tuple[str, dict[str, object]]] = [
        (f"cn=p{number},{base}", {"objectClass": "organizationalRole", "cn": f"p{number}"}) for number in range(3000)
    ]
    slapd.add_many([(base, {"objectClass": "organizationalUnit", "ou": unique}), *people])
    harness = SourceHarness.of(queues, slapd, unique, base=base)
    store = await SourceStore.open(queues)
    killed = start(unique, PURVEYOR_LDAP_BASE=base)
    await until(harness.records)
    killed.stop(signal.SIGKILL)
    slapd.delete(people[0][0])
    process = start(unique, PURVEYOR_LDAP_BASE=base)
    process.wait_for("standby")
    process.wait_for("following")
    copy = await harness.until_copy(lambda copy: len(copy.entries) == 3000)
    assert people[0][0] not in copy.dns
    await until(lambda: store.state(unique))
    assert process.stop() == 0


def test_what_is_wrong_with_the_settings_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    invoke("serve", "ldap").refused("no directory is set", "PURVEYOR_LDAP_URI")
    invoke("serve", "ldap", "--uri", "ldap://localhost").refused("ldap_uri without ldap_base")
    invoke("serve", "ldap", "--uri", "ldap://a:secret@b", "--base", "dc=a").refused("flag --uri", "leave the user out")
    monkeypatch.setenv("PURVEYOR_LDAP_PASSWORD", "hidden")
    outcome = invoke("serve", "ldap", "--uri", "ldap://localhost", "--base", "dc=a")
    outcome.refused("a password without a bind DN")
    assert "hidden" not in outcome.err
