"""`purveyor topic`: the topics that were declared or seen, their schemas, and the subscriptions to them."""

from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer

from purveyor.app.cli.backends.api_access import call_backend
from purveyor.app.cli.backends.topic_backend import DirectTopics, RemoteTopics, Topics
from purveyor.app.cli.context import Cli, JsonFlag, YesFlag, confirm, examples
from purveyor.app.cli.output import write, write_json, write_note
from purveyor.app.cli.parsers import parse_label, utc_now
from purveyor.app.cli.render import format_block, format_table, read_time
from purveyor.model.json_fields import Json
from purveyor.sources.schemas.registry import MAX_TOPICS
from purveyor.sources.schemas.schema import Topic

app = typer.Typer(
    help="Declare and list topics, with the subscriptions to them.", rich_markup_mode=None, add_completion=False
)
T = TypeVar("T")

Label = Annotated[str, typer.Argument(metavar="REALM:TOPIC", help="The exact topic.")]


@app.command("list", epilog=examples("purveyor topic list", "purveyor topic list --json"))
def list_(ctx: typer.Context, as_json: JsonFlag = False) -> None:
    """List the topics that were declared, or that the API or `purveyor publish` has accepted an event for."""
    cli = Cli.of(ctx, as_json)
    found = _call(cli, lambda topics: topics.list_topics())
    if found.is_full:
        write_note(
            f"the list is full: topics beyond {MAX_TOPICS} are delivered, but not listed; delete some to make room"
        )
    if cli.json:
        write_json(found.topics, indent=2)
        return
    rows = [(each["realm"], each["topic"], _state(each), _schema(each), each["subscriptions"]) for each in found.topics]
    write(format_table(("REALM", "TOPIC", "STATE", "SCHEMA", "SUBSCRIPTIONS"), rows, wrap=("SUBSCRIPTIONS",)))


@app.command(
    "add",
    epilog=examples(
        "purveyor topic add shop:orders --description 'Orders, from the basket on'",
        "purveyor topic add shop:orders --strict",
    ),
)
def add(
    ctx: typer.Context,
    label: Label,
    description: Annotated[str, typer.Option(metavar="TEXT", help="A description.")] = "",
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse events of other, undeclared topics of its realm.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Declare a topic, or change its declaration.

    Declaring a topic is optional. With --strict, events of the same realm whose topic is not declared are refused.
    """
    realm, topic = parse_label(label)
    wanted = Topic(realm=realm, topic=topic, since=utc_now(), declared=True, strict=strict, description=description)
    cli = Cli.of(ctx, as_json)
    found, created = _call(cli, lambda topics: topics.declare(wanted))
    if cli.json:
        write_json({**found, "created": created}, indent=2)
    else:
        write(f"{'Declared' if created else 'Declared again:'} {label}")


@app.command("show", epilog=examples("purveyor topic show shop:orders"))
def show(ctx: typer.Context, label: Label, as_json: JsonFlag = False) -> None:
    """Show a topic: its schema, and the subscriptions to it."""
    realm, topic = parse_label(label)
    cli = Cli.of(ctx, as_json)
    found = _call(cli, lambda topics: topics.get(realm, topic))
    if cli.json:
        write_json(found, indent=2)
        return
    rows = [
        ("State", _state(found)),
        ("Since", read_time(found["since"])),
        ("Description", found["description"]),
        ("Schema", _schema(found)),
        ("Subscriptions", found["subscriptions"]),
    ]
    write(format_block(f"Topic {label}", rows))


@app.command("delete", epilog=examples("purveyor topic delete shop:orders --yes"))
def delete(ctx: typer.Context, label: Label, yes: YesFlag = False, as_json: JsonFlag = False) -> None:
    """Remove a topic from the list; the next accepted event of the topic adds it again."""
    realm, topic = parse_label(label)
    confirm(f"Remove the topic {label} from the list?", yes=yes)
    cli = Cli.of(ctx, as_json)
    _call(cli, lambda topics: topics.forget(realm, topic))
    write_json({"realm": realm, "topic": topic, "deleted": True}) if cli.json else write(f"Removed {label}")


def _state(topic: Json) -> str:
    if not topic["declared"]:
        return "seen"
    return "declared, strict" if topic["strict"] else "declared"


def _schema(topic: Json) -> str | None:
    schema = topic["schema"]
    return None if schema is None else f"{schema['name']}, revision {schema['revision']}"


def _call(cli: Cli, work: Callable[[Topics], Awaitable[T]]) -> T:
    return call_backend(cli, DirectTopics.open, RemoteTopics, work)
