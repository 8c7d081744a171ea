"""Schemas and topics from the command line: added, checked, listed, and obeyed by `purveyor publish`."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import Cli

ORDER: dict[str, Any] = {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]}
AVRO = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "string"}]}


def write(name: str, definition: Any) -> str:
    Path(name).write_text(json.dumps(definition), encoding="utf-8")
    return name


def test_a_schema_is_added_committed_rolled_back_and_deleted(cli: Cli, unique: str) -> None:
    order = write("order.json", ORDER)
    wider = write("wider.json", {**ORDER, "required": []})
    topic = ("--topic", f"{unique}:orders")
    assert cli("schema", "add", unique, order, *topic).ok().out == f"Added schema {unique}, revision 1\n"
    assert cli("schema", "add", unique, order, *topic).ok().out == f"Unchanged: schema {unique}, revision 1\n"
    assert cli("schema", "check", unique, wider).ok().out == "The definition is compatible\n"
    assert cli("schema", "add", unique, wider).ok().out == f"Committed schema {unique}, revision 2\n"
    refused = cli("schema", "check", unique, order, "--json")
    assert (refused.code, refused.json["ok"]) == (1, False)
    cli("schema", "add", unique, order).refused("not backward-compatible", "id is required now")
    assert "revision 3 now" in cli("schema", "rollback", unique, "1").ok().out
    shown = cli("schema", "show", unique, "--json").ok().json
    assert (shown["revision"], shown["revisions"], shown["definition"]) == (3, [1, 2, 3], ORDER)
    assert cli("schema", "show", unique, "--revision", "2", "--json").ok().json["definition"]["required"] == []
    assert f"{unique}:orders" in cli("schema", "show", unique).ok().out
    cli("schema", "delete", unique, "--revision", "2", "--yes").ok()
    cli("schema", "delete", unique, "--revision", "3", "--yes").refused("in force")
    assert unique in {each["name"] for each in cli("schema", "list", "--json").ok().json}
    assert unique in cli("schema", "list").ok().out
    assert "Changed" in cli("schema", "add", unique, "--compatibility", "none").ok().out
    cli("schema", "add", unique, "--encoding", "binary").refused("needs another name")
    cli("schema", "delete", unique, "--yes").ok()
    cli("schema", "show", unique).refused(f"no schema '{unique}'")


def test_publish_refuses_what_does_not_fit_and_names_the_place(cli: Cli, unique: str) -> None:
    cli("schema", "add", unique, write("order.avsc", AVRO), "--topic", f"{unique}:o.*").ok()
    assert cli("schema", "show", unique, "--json").ok().json["type"] == "avro"
    assert cli("schema", "check", unique, "--object", '{"id": "1"}').ok().out == "The object fits\n"
    one = ("publish", "--realm", unique, "--topic", "orders")
    cli(*one, "--new", '{"id": 7}').refused("body.new.id: a number is no string", unique)
    cli(*one, "--new", '{"id": "7"}').ok()
    lines = [{"realm": unique, "topic": "orders", "body": {"new": {"id": value}}} for value in ("1", 2, "3")]
    Path("events.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    done = cli("publish", "events.jsonl")
    assert done.code == 1
    assert done.err.startswith("line 2: body.new.id: a number is no string")
    assert done.out.startswith("Published 2 events, 0 duplicates, 1 broken")
    (found,) = [each for each in cli("topic", "list", "--json").ok().json if each["realm"] == unique]
    assert (found["topic"], found["declared"], found["schema"]["name"]) == ("orders", False, unique)


def test_a_strict_realm_takes_declared_topics_alone(cli: Cli, unique: str) -> None:
    assert cli("topic", "add", f"{unique}:a", "--strict", "--description", "A").ok().out == f"Declared {unique}:a\n"
    assert "again" in cli("topic", "add", f"{unique}:a", "--strict", "--description", "A").ok().out
    cli("publish", "--realm", unique, "--topic", "a", "--new", '{"id": 1}').ok()
    cli("publish", "--realm", unique, "--topic", "b", "--new", '{"id": 1}').refused("'b' is not declared")
    shown = cli("topic", "show", f"{unique}:a").ok().out
    assert "declared, strict" in shown
    assert unique in cli("topic", "list").ok().out
    cli("topic", "delete", f"{unique}:a", "--yes").ok()
    cli("topic", "show", f"{unique}:a").refused("no topic")
    cli("publish", "--realm", unique, "--topic", "b", "--new", '{"id": 1}').ok()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("schema", "add", "x y", "order.json", "--topic", "a:b"), "invalid schema name"),
        (("schema", "add", "none"), "no schema 'none' yet"),
        (("schema", "add", "none", "order.json"), "no schema 'none' yet"),
        (("schema", "add", "none", "missing.json"), "cannot be read"),
        (("schema", "add", "none", "list.json", "--topic", "a:b"), "is a list"),
        (("schema", "add", "none", "order.json", "--topic", "a:b", "--type", "avro"), "the Avro schema"),
        (("schema", "check", "none"), "exactly one of a definition and an object"),
        (("schema", "delete", "none", "--yes"), "no schema 'none'"),
        (("topic", "add", "shop"), "invalid topic"),
        (("topic", "delete", "a:b", "--yes"), "no topic a:b"),
    ],
)
def test_invalid_arguments_are_refused(cli: Cli, argv: tuple[str, ...], words: str) -> None:
    write("order.json", ORDER)
    write("list.json", [])
    cli(*argv).refused(words)
