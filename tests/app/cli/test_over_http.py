"""Commands over the HTTP API do and print the same as on the NATS server."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from purveyor.jetstream.address import Address
from purveyor.queues.catalogue import DEAD_LETTERS
from purveyor.queues.client import Queues
from tests.support.api_fixtures import running_api
from tests.support.command_line import Cli, Outcome, invoke
from tests.support.running_api import PASSWORD, RunningApi, fill, on_server
from tests.support.waiting import wait_until

__all__ = ["running_api"]
ORDER: dict[str, Any] = {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]}
_TIME = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.:+0-9]*(?: UTC)?"
_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}"
_NUMBER = r"""(?<=position )\d+|(?<=begins after )\d+|(?<=force after )\d+|(?<="lease_id": ")\d+"""
_FIELD = "|".join(f'(?<="{name}": )\\d+' for name in ("position", "begin", "in_force_after", "dispatched_up_to", "lag"))
_VARIABLE = re.compile(f"{_TIME}|{_UUID}|{_NUMBER}|{_FIELD}")
"""Times, random ids and positions."""


@dataclass(frozen=True)
class BothWays:
    """Runs a command on the NATS server and over the API."""

    direct: Cli
    remote: Cli
    name: str

    def same(self, *argv: str, stdin: bytes = b"") -> Outcome:
        """Run a command that changes nothing; both ways print the same."""
        here, there = self.direct(*argv, stdin=stdin), self.remote(*argv, stdin=stdin)
        assert there == here, (there, here)
        return here

    def alike(self, *argv: str, stdin: bytes = b"") -> Outcome:
        """Run a command on two names in place of `{}`; the output differs only in the name, times and ids."""
        names = f"{self.name}-d", f"{self.name}-r"
        ways = zip((self.direct, self.remote), names, strict=True)
        runs = [(run(*(word.replace("{}", name) for word in argv), stdin=stdin), name) for run, name in ways]
        here, there = (replace(each, out=_plain(each.out, name), err=_plain(each.err, name)) for each, name in runs)
        assert there == here, (there, here)
        return here


def _plain(text: str, name: str) -> str:
    return _VARIABLE.sub("0", text.replace(name, "{}"))


def over_http(api: RunningApi, user: str) -> Cli:
    """Return a function that runs `purveyor` over the API."""

    def run(*argv: str, stdin: bytes = b"") -> Outcome:
        return invoke("--api", api.url, "--api-user", user, *argv, stdin=stdin)

    return run


@pytest.fixture
def both(cli: Cli, running_api: RunningApi, monkeypatch: pytest.MonkeyPatch, unique: str) -> BothWays:
    monkeypatch.setenv("PURVEYOR_API_PASSWORD", "admin-secret")
    return BothWays(cli, over_http(running_api, "admin"), unique)


def write(name: str, content: object) -> str:
    Path(name).write_text(json.dumps(content), encoding="utf-8")
    return name


def test_topics_are_the_same_both_ways(both: BothWays) -> None:
    both.alike("topic", "add", "{}:a/b c?%2F", "--strict", "--description", "A\nB")
    both.alike("topic", "add", "{}:a/b c?%2F", "--strict", "--description", "A\nB", "--json")
    both.alike("topic", "show", "{}:a/b c?%2F")
    for name in (f"{both.name}-d", f"{both.name}-r"):
        shown = both.same("topic", "show", f"{name}:a/b c?%2F", "--json").ok().json
        assert (shown["topic"], shown["strict"]) == ("a/b c?%2F", True)
    listed = both.same("topic", "list").ok().out
    assert f"{both.name}-r" in listed
    assert len(both.same("topic", "list", "--json").ok().json) >= 2
    both.alike("topic", "show", "{}:none").refused("no topic")
    both.direct("topic", "add", f"{both.name}:x", "--description", "\ud800").refused("half of a surrogate pair")
    both.remote("topic", "add", f"{both.name}:x", "--description", "\ud800").refused("half of a surrogate pair")
    both.remote("topic", "show", "a:\udcff").refused("is not UTF-8")
    both.alike("topic", "delete", "{}:a/b c?%2F", "--yes").ok()
    both.alike("topic", "delete", "{}:a/b c?%2F", "--yes", "--json").refused("no topic")
    both.remote("topic", "show", "a/b:c").refused("no path of the API can name the realm 'a/b'")


def test_schemas_are_the_same_both_ways(both: BothWays) -> None:
    order, wider = write("order.json", ORDER), write("wider.json", {**ORDER, "required": []})
    both.alike("schema", "add", "{}", order).refused("there is no schema '{}' yet")
    both.alike("schema", "add", "{}", order, "--topic", "{}:orders", "--json").ok()
    both.alike("schema", "add", "{}", order).ok()
    both.alike("schema", "check", "{}", wider).ok()
    both.alike("schema", "check", "{}", "--object", '{"id": 7}')
    both.alike("schema", "check", "{}", "--object", "[").refused("not JSON")
    both.alike("schema", "add", "{}", wider).ok()
    assert both.alike("schema", "check", "{}", order, "--json").code == 1
    both.alike("schema", "add", "{}", order).refused("not backward-compatible")
    both.alike("schema", "rollback", "{}", "1").ok()
    both.alike("schema", "rollback", "{}", "7").refused("no revision 7")
    both.alike("schema", "add", "{}", "--compatibility", "none").ok()
    both.alike("schema", "add", "{}", "--encoding", "binary").refused("needs another name")
    both.same("schema", "list").ok()
    assert both.same("schema", "list", "--json").ok().json[0]["revision_created"]
    both.alike("schema", "show", "{}").ok()
    both.alike("schema", "show", "{}", "--revision", "2", "--json").ok()
    both.alike("schema", "show", "{}", "--revision", "9").refused("no revision 9", "it has 1, 2, 3")
    both.alike("schema", "delete", "{}", "--revision", "3", "--yes").refused("in force")
    both.alike("schema", "delete", "{}", "--revision", "2", "--yes").ok()
    both.alike("schema", "delete", "{}", "--yes", "--json").ok()
    both.alike("schema", "show", "{}").refused("no schema '{}'")
    both.alike("schema", "show", "x y").refused("invalid schema name")


def test_events_are_published_the_same_both_ways(
    both: BothWays, running_api: RunningApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = write("order.json", ORDER)
    for realm in (f"{both.name}-d", f"{both.name}-r"):
        both.direct("schema", "add", realm, order, "--topic", f"{realm}:orders").ok()
    both.remote("publish", "--realm", "r", "--topic", "t", "--new", '{"id": "1"}').refused(
        "'admin' (admin) may not do this", "fix: this needs a login for events"
    )
    monkeypatch.setenv("PURVEYOR_API_PASSWORD", "events-secret")
    both = replace(both, remote=over_http(running_api, "events"))
    one = ("publish", "--realm", "{}", "--topic", "orders", "--new")
    wrong = [word.replace("{}", f"{both.name}-r") for word in (*one, '{"id": 7}')]
    wait_until(lambda: both.remote(*wrong).code == 1)  # the API has read the schema
    both.alike(*one, '{"id": 7}').refused('body.new.id: the value is not of type "string"')
    for flags in ((), ("--json",)):
        both.alike(*one, '{"id": "1"}', "--id", "{}-1", *flags).ok()
    both.alike("publish", "--realm", "r", "--new", '{"a": 1}').refused("'topic'")
    assert set(both.alike(*one, '{"id": "2"}', "--json").ok().json) == {"position", "id", "duplicate"}
    both.alike("publish", "-", stdin=b"").ok()
    both.alike("publish", "missing.jsonl").refused("missing.jsonl cannot be read")


@pytest.mark.parametrize("batch", [1000, 3])
def test_lines_are_published_the_same_both_ways(
    both: BothWays, running_api: RunningApi, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    monkeypatch.setattr("purveyor.app.cli.backends.event_backend.MAX_EVENTS_PER_BATCH", batch)
    monkeypatch.setenv("PURVEYOR_API_PASSWORD", "events-secret")
    both = replace(both, remote=over_http(running_api, "events"))

    def event(number: object, **more: object) -> str:
        body = {"new": {"id": str(number)}}
        return json.dumps({"realm": both.name, "topic": "orders", "body": body, "id": f"{{}}-{number}", **more})

    lines = [*map(event, range(40))]
    lines[3:3] = ["", "{broken", event(7, topic=None), lines[2], "[]", event(8, id=9)]
    lines += [event(9, id=None), event(9, realm=7), event(9, body={"new": {"text": "x" * (16 << 20)}})]
    for name in ("d", "r"):
        text = "\n".join(lines).replace("{}", f"{both.name}-{name}")
        Path(f"{both.name}-{name}.jsonl").write_text(text, encoding="utf-8")
    for flags in ((), ("--json",)):
        done = both.alike("publish", "{}.jsonl", *flags)
        assert done.code == 1
        broken = [line.partition(":")[0] for line in done.err.splitlines()]
        assert broken == ["line 5", "line 6", "line 8", "line 9", "line 48", "line 49"]
    assert (done.json["duplicates"], done.json["broken"]) == (41, 6)


def test_dead_letters_are_the_same_both_ways(
    both: BothWays, running_api: RunningApi, address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (f"{both.name}-d", f"{both.name}-r"):
        both.direct(
            "subscription", "add", name, "--topic", "udm:users/user", "--password-file", "-", stdin=PASSWORD.encode()
        ).ok()
        fill(address, name, range(5))
        client = running_api.client(name, PASSWORD)
        for sequence in range(1, 6):
            path = f"/v1/subscriptions/{name}/messages"
            assert client.get(f"{path}/next").json()["sequence_number"] == sequence
            reason = {"status": "reject", "reason": "quota" if sequence > 1 else "no such mailbox"}
            assert client.patch(f"{path}/{sequence}/status", json=reason).status_code == 200
    mine = f"{both.name}-r"
    both.same("dlq", "list", "--subscription", mine)
    listed = both.same("dlq", "list", "--subscription", mine, "--reason", "QUOTA", "--json").ok().json
    ids = [str(each["id"]) for each in listed]
    assert len(ids) == 4
    both.same("dlq", "list", "--subscription", mine, "--limit", "2", "--after", ids[0])
    both.same("dlq", "list", "--origin", f"subscription:{mine}", "--subscription", mine, "--json").ok()
    both.same("dlq", "list", "--subscription", "nobody").refused("no subscription 'nobody'")
    for flags in ((), ("--json",), ("--raw",), ("--subscription", mine)):
        both.same("dlq", "show", ids[0], *flags).ok()
    both.same("dlq", "show", ids[0], "--subscription", f"{both.name}-d").refused("no dead letter")
    both.same("dlq", "show", "999999999").refused("no dead letter 999999999")
    both.same("dlq", "retry", "--reason", "", "--yes").refused("--reason is empty")
    both.alike("dlq", "retry", "--subscription", "{}", "--reason", "mailbox", "--dry-run").ok()
    both.alike("dlq", "retry", "--subscription", "{}", "--reason", "mailbox", "--yes", "--json").ok()
    monkeypatch.setattr("purveyor.app.cli.backends.dead_letter_backend._SETTLED_PER_REQUEST", 1)
    monkeypatch.setattr("purveyor.app.cli.backends.dead_letter_backend._LISTED_PER_REQUEST", 1)
    both.same("dlq", "list", "--subscription", mine, "--json").ok()
    both.same("dlq", "list", "--subscription", mine, "--limit", "3")
    both.alike("dlq", "discard", "--subscription", "{}", "--dry-run", "--json").ok()
    assert "4 dead letters" in both.alike("dlq", "discard", "--subscription", "{}", "--yes").ok().out
    both.same("dlq", "list", "--subscription", mine, "--json").ok()
    both.same("dlq", "discard", ids[0], "--yes").refused(f"no dead letter {ids[0]}")

    async def park_rubbish(queues: Queues) -> int:
        await queues.ensure(DEAD_LETTERS)
        return (await queues.publish(f"dead-letters.{mine}", b"\xff\x00", headers={"A": "ü\x7f"})).sequence

    rubbish = str(on_server(address, park_rubbish))
    for flags in ((), ("--json",)):
        both.same("dlq", "show", rubbish, *flags)
    assert both.same("dlq", "retry", rubbish, "--yes").code == 1
    both.direct("dlq", "discard", rubbish, "--yes").ok()


def test_subscriptions_are_the_same_both_ways(both: BothWays, running_api: RunningApi) -> None:
    both.alike("subscription", "add", "{}").refused("needs a topic")
    both.alike("subscription", "add", "a.b", "-t", "udm:x").refused("invalid subscription name")
    add = ["subscription", "add", "{}", "-t", "udm:users/user", "-t", "udm:groups/.*", "--prefill", "--lease", "1m"]
    add += ["--filter-field", "level=3", "--filter-attribute", "tenant=north", "--hide", "secret", "--retention", "7d"]
    both.alike(*add).ok()
    both.alike(*add, "--json").ok()
    both.alike(*add, "--delivery", "parallel").refused("exists with other parameters")
    both.alike("subscription", "add", "{}", "-t", "udm:(", "--json").refused()
    both.alike("subscription", "edit", "{}").refused("no change of subscription")
    edits = (
        ("--delivery", "parallel", "--order-by", "key", "--max-attempts", "3"),
        ("--min-backoff", "5s", "--json"),
        ("--reset", "filter", "--reset", "hide", "--reset", "retention"),
    )
    for flags in edits:
        both.alike("subscription", "edit", "{}", *flags).ok()
    topics = ("--add-topic", "mail:box", "--add-topic", "mail:.*", "--prefill")
    assert " in force after 0" in both.alike("subscription", "edit", "{}", *topics).ok().out
    both.alike("subscription", "edit", "{}", "--remove-topic", "mail:box", "--json").ok()
    both.alike("subscription", "edit", "{}", "--remove-topic", "mail:box").refused("has no topic mail:box")
    both.alike("subscription", "edit", "{}", "--add-topic", ".*:box").refused("a realm is exact")
    both.alike("subscription", "edit", "{}", "--ack-deadline", "5s").refused("the subscription has no endpoint")
    both.alike("subscription", "edit", "none-{}", "--lease", "5s").refused("no subscription")
    mine = f"{both.name}-r"
    both.same("subscription", "show", mine).ok()
    shown = both.same("subscription", "show", mine, "--json").ok().json
    assert (shown["delivery"], shown["retry"]["min_backoff_seconds"], shown["backlog"]) == ("parallel", 5.0, 0)
    both.same("subscription", "show", "nobody").refused("no subscription 'nobody'")
    both.same("subscription", "list").ok()
    assert mine in {each["name"] for each in both.same("subscription", "list", "--json").ok().json}

    both.alike("subscription", "prefill", "{}").ok()
    both.alike("subscription", "prefill", "{}", "--json").ok()
    both.alike("subscription", "pause", "{}").ok()
    assert "paused" in both.same("subscription", "show", mine).out
    both.alike("subscription", "resume", "{}", "--json").ok()
    both.alike("subscription", "replay", "{}", "--from", "99999999").refused("and the newest position is")
    both.alike("subscription", "replay", "{}", "--from", "2099-01-01T00:00:00Z").refused("in the future")
    both.alike("subscription", "replay", "{}", "--from", "1", "--to", "9", "-t", "udm:users/user", "--json").ok()
    both.alike("subscription", "replay", "{}", "--from", "1").refused("waits already")
    both.alike("subscription", "password", "{}", "--password-file", "-", stdin=b"its password").ok()
    both.alike("subscription", "password", "{}", "--keep", "1h", "--password-file", "-", stdin=b"another").ok()
    for user, password in ((mine, "another"), (mine, "its password"), (f"{both.name}-d", "another")):
        assert running_api.client(user, password).get(f"/v1/subscriptions/{user}").status_code == 200
    both.alike("subscription", "delete", "{}").refused("no terminal to confirm on")
    both.alike("subscription", "delete", "{}", "--yes").ok()
    both.alike("subscription", "delete", "{}", "--yes", "--force").refused("no subscription '{}'")


def test_push_subscriptions_are_the_same_both_ways(both: BothWays) -> None:
    add = ("subscription", "add", "{}", "-t", "udm:users/user", "--push", "https://shop.example/in")
    more = ("--secret-env", "PURVEYOR_PUSH_SECRET_X", "--bearer-env", "PURVEYOR_PUSH_SECRET_Y", "--dead-letter")
    both.alike(*add, *more, "--after-dead-letter", "park_key", "--order-by", "key").ok()
    both.alike("subscription", "edit", "{}", "--secret-env", "PURVEYOR_PUSH_SECRET_Z", "--format", "raw", "--json").ok()
    both.alike("subscription", "edit", "{}", "--push", "https://other.example/in").refused("would be sent there")
    both.alike("subscription", "edit", "{}", "--reset", "bearer", "--max-attempts", "9").ok()
    shown = both.same("subscription", "show", f"{both.name}-r").ok().out
    assert "with two secrets" in shown
    assert "Bearer token" not in shown
    both.alike("subscription", "attempts", "{}").ok()
    both.alike("subscription", "attempts", "{}", "--failed", "--since", "1h", "--key", "a b&c", "--json").ok()
    both.alike("subscription", "attempts", "{}", "--before", "17").refused("is not the id of an attempt")


def test_a_generated_secret_stays_when_the_command_is_repeated_over_http(
    both: BothWays, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = ("subscription", "add", both.name, "-t", "udm:x", "--push", "https://shop.example/in", "--secret", "--json")
    without_key = both.remote(*add)
    assert "secret" in without_key.err or without_key.json["secret"].startswith("whsec_")


def test_messages_are_the_same_both_ways(
    both: BothWays, running_api: RunningApi, address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = {f"{both.name}-d": both.direct, f"{both.name}-r": over_http(running_api, f"{both.name}-r")}
    for name in users:
        add = ("subscription", "add", name, "--topic", "udm:users/user", "--password-file", "-")
        both.direct(*add, stdin=PASSWORD.encode()).ok()
        fill(address, name, range(6))
    both.direct("publish", "--realm", "udm", "--topic", "x", "--new", '{"id": "1"}').ok()  # no pipeline dispatches it
    both.remote("next", f"{both.name}-r").refused(
        "'admin' (admin) may not do this", "this needs the login of subscription"
    )
    monkeypatch.setenv("PURVEYOR_API_PASSWORD", PASSWORD)
    both = replace(both, remote=users[f"{both.name}-r"])
    both.alike("next", "{}").ok()
    both.alike("next", "{}", "--json").ok()
    both.alike("next", "{}", "--instance", "other", "--wait", "0").refused("no message")
    both.alike("ack", "{}", "1", "--instance", "other").ok()
    both.alike("ack", "{}", "1").refused("has no message 1")
    both.alike("ack", "{}", "9").refused("9")
    both.alike("next", "{}", "--count", "3").ok()
    both.alike("ack", "{}", "3", "--up-to", "--json").ok()
    both.alike("ack", "{}", "3", "--up-to").refused()
    both.alike("next", "{}", "--ack", "--follow", "--count", "2", "--json")
    both.alike("next", "{}", "--ack", "--json").ok()
    both.alike("next", "{}", "--wait", "0").refused("no message for subscription '{}' within 0: the pipeline has not")
    both.alike("dlq", "list", "--subscription", "{}", "--json").ok()
    both.alike("subscription", "pause", "{}").ok()
    both.alike("next", "{}", "--wait", "0").refused("it is paused")
