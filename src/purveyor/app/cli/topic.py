"""`purveyor topic`: the topics that were declared or seen, their schemas, and who asks for them."""

from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer

from purveyor.app.cli.context import Cli, JsonFlag, YesFlag, confirm, examples
from purveyor.app.cli.parsers import utc_now
from purveyor.app.cli.render import block, note, table, write, write_json
from purveyor.app.views.topic_view import Known, known_topics, topic_known
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.model.errors import InvalidInput
from purveyor.sources.schemas.cache import MOST_TOPICS
from purveyor.sources.schemas.registry import Schemas
from purveyor.sources.schemas.schema import Topic

app = typer.Typer(
    help="Declare topics; see which there are and who asks for them.", rich_markup_mode=None, add_completion=False
)
T = TypeVar("T")

Label = Annotated[str, typer.Argument(metavar="REALM:TOPIC", help="The topic, exact.")]


@app.command("list", epilog=examples("purveyor topic list", "purveyor topic list --json"))
def list_(ctx: typer.Context, as_json: JsonFlag = False) -> None:
    """List the topics that were declared, or that an event was accepted for by the API or `purveyor publish`."""
    cli = Cli.of(ctx, as_json)
    found = _call(cli, known_topics)
    if len(found) >= MOST_TOPICS:
        note(f"the list is full: topics beyond {MOST_TOPICS} are delivered, but not listed; delete some to make room")
    if cli.json:
        write_json([each.to_json() for each in found], indent=2)
        return
    rows = [
        (each.topic.realm, each.topic.topic, _state(each.topic), _schema(each), list(each.subscriptions))
        for each in found
    ]
    write(table(("REALM", "TOPIC", "STATE", "SCHEMA", "SUBSCRIPTIONS"), rows, wrap=("SUBSCRIPTIONS",)))


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
    description: Annotated[str, typer.Option(metavar="TEXT", help="What it is about.")] = "",
    strict: Annotated[bool, typer.Option("--strict", help="Its realm takes declared topics alone.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Declare a topic, or change what was declared.

    A topic need not be declared. With --strict, events of the same realm that are of no declared topic are refused.
    """
    realm, topic = parse_label(label)
    wanted = Topic(realm=realm, topic=topic, since=utc_now(), declared=True, strict=strict, description=description)
    cli = Cli.of(ctx, as_json)

    async def work(schemas: Schemas, subscriptions: Subscriptions) -> tuple[Known, bool]:
        _, created = await schemas.declare(wanted)
        return await topic_known(schemas, subscriptions, realm, topic), created

    found, created = _call(cli, work)
    if cli.json:
        write_json({**found.to_json(), "created": created}, indent=2)
    else:
        write(f"{'Declared' if created else 'Declared again:'} {label}")


@app.command("show", epilog=examples("purveyor topic show shop:orders"))
def show(ctx: typer.Context, label: Label, as_json: JsonFlag = False) -> None:
    """Show a topic: its schema, and the subscriptions that ask for it."""
    realm, topic = parse_label(label)
    cli = Cli.of(ctx, as_json)
    found = _call(cli, lambda schemas, subscriptions: topic_known(schemas, subscriptions, realm, topic))
    if cli.json:
        write_json(found.to_json(), indent=2)
        return
    rows = [
        ("State", _state(found.topic)),
        ("Since", found.topic.since),
        ("Description", found.topic.description),
        ("Schema", _schema(found)),
        ("Subscriptions", list(found.subscriptions)),
    ]
    write(block(f"Topic {label}", rows))


@app.command("delete", epilog=examples("purveyor topic delete shop:orders --yes"))
def delete(ctx: typer.Context, label: Label, yes: YesFlag = False, as_json: JsonFlag = False) -> None:
    """Forget a topic; the next event that is accepted for it makes it known again."""
    realm, topic = parse_label(label)
    confirm(f"Forget the topic {label}?", yes=yes)
    cli = Cli.of(ctx, as_json)
    _call(cli, lambda schemas, _: schemas.forget_topic(realm, topic))
    write_json({"realm": realm, "topic": topic, "deleted": True}) if cli.json else write(f"Forgot {label}")


def parse_label(text: str) -> tuple[str, str]:
    """`REALM:TOPIC`, both exact.

    >>> parse_label("shop:orders")
    ('shop', 'orders')
    """
    realm, colon, topic = text.partition(":")
    if not colon or not realm or not topic:
        raise InvalidInput(f"invalid topic {text!r}", fix="write REALM:TOPIC, as shop:orders")
    return realm, topic


def _state(topic: Topic) -> str:
    if not topic.declared:
        return "seen"
    return "declared, strict" if topic.strict else "declared"


def _schema(found: Known) -> str | None:
    return None if found.schema is None else f"{found.schema.name}, revision {found.schema.newest.number}"


def _call(cli: Cli, work: Callable[[Schemas, Subscriptions], Awaitable[T]]) -> T:
    replicas = cli.settings().replicas
    return cli.call(lambda queues: work(Schemas(queues, replicas=replicas), Subscriptions(queues, replicas=replicas)))
