"""`purveyor publish`: store events in `incoming`, one from options or many from lines of JSON."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from purveyor.app.cli.context import Cli, JsonFlag, examples
from purveyor.app.cli.output import write, write_json, write_note
from purveyor.app.cli.parsers import utc_now
from purveyor.jetstream.api_protocol import Receipt
from purveyor.model import json_fields
from purveyor.model.errors import InvalidInput
from purveyor.model.event import SUBJECT
from purveyor.queues.catalogue import incoming
from purveyor.queues.client import Queues
from purveyor.sources.http_events import NO_LOGIN, EventPublisher, IncomingEvent, check_event_size, event_trace
from purveyor.sources.schemas.registry import SchemaCache

if TYPE_CHECKING:
    from purveyor.jetstream import bulk

app = typer.Typer(rich_markup_mode=None, add_completion=False)
_MAX_LINE_BYTES = 64 << 20


@dataclass(slots=True)
class Tally:
    """The result of publishing lines."""

    stored: int = 0
    duplicates: int = 0
    broken: int = 0
    position: int | None = None
    topics: set[tuple[str, str]] = field(default_factory=set)
    """The realms and topics of the accepted events."""


@app.command(
    epilog=examples(
        """purveyor publish --realm shop --topic orders --key 17 --new '{"total": 12.5}'""",
        """purveyor publish --realm udm --topic users/user --old '{"uuid": "u-1"}' --id deletion-of-u-1""",
        "purveyor publish events.jsonl",
        "generate-events | purveyor publish -",
    )
)
def publish(
    ctx: typer.Context,
    file: Annotated[
        str | None, typer.Argument(metavar="[FILE|-]", help="Events as lines of JSON; - is standard input.")
    ] = None,
    realm: Annotated[
        str | None, typer.Option(metavar="REALM", help="The realm: the system that the event is from.")
    ] = None,
    topic: Annotated[str | None, typer.Option(metavar="TOPIC", help="The topic.")] = None,
    key: Annotated[
        str | None, typer.Option(metavar="KEY", help="The key of the object; default: its id field.")
    ] = None,
    new: Annotated[str | None, typer.Option(metavar="JSON", help="The new state of the object.")] = None,
    old: Annotated[str | None, typer.Option(metavar="JSON", help="The old state of the object.")] = None,
    attribute: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="An attribute; repeatable.")] = None,
    id_: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="The id by which the server recognises a repeat.")
    ] = None,
    publisher: Annotated[str, typer.Option(metavar="NAME", help="The name of the publisher.")] = "purveyor",
    as_json: JsonFlag = False,
) -> None:
    """Publish one event from options, or many from a file with one JSON object on each line.

    A line is an event as the API accepts it: realm, topic, body with old and new; optional are key, attributes, id,
    publisher_name and ts (default: now). The command reports the number of each line that is invalid or does not fit
    the schema of its topic, and publishes the rest.

    Exit codes: 0 all events are stored; 1 some lines were invalid, or an error.
    """
    cli = Cli.of(ctx, as_json)
    one = {"realm": realm, "topic": topic, "key": key, "new": new, "old": old, "attribute": attribute, "id": id_}
    given = [f"--{name}" for name, value in one.items() if value]
    if file is not None and given:
        raise InvalidInput(f"{', '.join(given)} and a file of events exclude each other", fix="give one or the other")
    if file is None and not given:
        raise InvalidInput("nothing to publish", fix="give --realm, --topic and --new, or a file of events")
    if file is not None:
        tally = _publish_many(cli, file, publisher)
        _print_tally(cli, tally)
        if tally.broken:
            raise typer.Exit(1)
        return
    fields = {
        "realm": realm,
        "topic": topic,
        "body": {
            side: json_fields.parse(text, f"{side} object") for side, text in (("new", new), ("old", old)) if text
        },
        "attributes": dict(map(_attribute, attribute or [])),
        **{name: value for name, value in (("key", key), ("id", id_)) if value is not None},
    }
    replicas = cli.settings().replicas
    identity, receipt = cli.call(lambda queues: _publish_one(queues, fields, publisher, replicas))
    _print_one(cli, identity, receipt)


def read_event(fields: json_fields.Json, publisher: str, schema_cache: SchemaCache) -> IncomingEvent:
    """Return an event with its defaults; raise InvalidInput if a field is missing or does not fit its schema."""
    given = {"publisher_name": publisher, "ts": utc_now().isoformat(), **fields}
    return IncomingEvent.read(given, schema_cache.validator)


async def _publish_one(queues: Queues, fields: json_fields.Json, publisher: str, replicas: int) -> tuple[str, Receipt]:
    schema_cache = SchemaCache(queues, replicas=replicas)
    async with schema_cache.following():
        given = read_event(fields, publisher, schema_cache)
        receipt = await EventPublisher(queues, replicas=replicas).publish(given, NO_LOGIN)
        await schema_cache.record_topics({given.realm_topic})
    return given.id, receipt


def _publish_many(cli: Cli, file: str, publisher: str) -> Tally:
    replicas = cli.settings().replicas
    tally = Tally()

    async def work(queues: Queues) -> None:
        from purveyor.jetstream import bulk  # noqa: PLC0415 - a slow import that only this branch needs

        (await queues.ensure(incoming(), replicas=replicas)).require_usable()
        stop = threading.Event()
        schema_cache = SchemaCache(queues, replicas=replicas)
        async with schema_cache.following():
            with _lines(file) as lines:
                try:
                    report = await queues.publish_many(
                        _messages(
                            lines,
                            partial(read_event, publisher=publisher, schema_cache=schema_cache),
                            queues.connection.max_payload,
                            tally,
                            stop,
                        ),
                        bulk.PublishOptions(expected_stream=incoming().stream),
                    )
                finally:
                    stop.set()  # after Ctrl-C the thread that reads would otherwise read everything
            await schema_cache.record_topics(tally.topics)
        tally.stored, tally.duplicates = report.stored, report.duplicates
        tally.position = report.last_sequences.get(incoming().stream)

    cli.call(work)
    return tally


def _messages(
    lines: IO[bytes],
    read: Callable[[json_fields.Json], IncomingEvent],
    max_payload: int,
    tally: Tally,
    stop: threading.Event,
) -> "Iterator[bulk.Outgoing]":
    for number, line in enumerate(iter(lambda: lines.readline(_MAX_LINE_BYTES), b""), start=1):
        if stop.is_set():
            return
        if not line.strip():
            continue
        try:
            given = read(json_fields.parse(line, "line"))
            check_event_size(given, max_payload)
        except InvalidInput as error:
            tally.broken += 1
            write_note(f"line {number}: {error.message}")
            continue
        tally.topics.add(given.realm_topic)
        yield SUBJECT, given.data, given.headers(NO_LOGIN, event_trace(given)), given.message_id(NO_LOGIN)


@contextmanager
def _lines(file: str) -> Iterator[IO[bytes]]:
    if file == "-":
        yield sys.stdin.buffer
        return
    try:
        opened = Path(file).open("rb")  # noqa: SIM115 - closed below; only errors of open() are about the name
    except OSError as error:
        raise InvalidInput(f"the file {file} cannot be read: {error.strerror}", fix="check its name") from None
    with opened:
        yield opened


def _attribute(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidInput(f"invalid attribute {text!r}", fix="write --attribute NAME=VALUE")
    return name, value


def _print_one(cli: Cli, identity: str, receipt: Receipt) -> None:
    if cli.json:
        write_json({"position": receipt.sequence, "id": identity, "duplicate": receipt.duplicate})
    else:
        again = ", a duplicate: not stored again" if receipt.duplicate else ""
        write(f"Published at position {receipt.sequence}{again}")


def _print_tally(cli: Cli, tally: Tally) -> None:
    if cli.json:
        write_json(
            {
                "stored": tally.stored,
                "duplicates": tally.duplicates,
                "broken": tally.broken,
                "position": tally.position,
            }
        )
        return
    where = f"; last position {tally.position}" if tally.position is not None else ""
    write(f"Published {tally.stored} events, {tally.duplicates} duplicates, {tally.broken} broken{where}")
