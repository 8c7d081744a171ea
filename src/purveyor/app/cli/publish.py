"""`purveyor publish`: events into `incoming`, one from options or many from lines of JSON."""

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
from purveyor.app.cli.parsers import utc_now
from purveyor.app.cli.render import note, write, write_json
from purveyor.jetstream.publisher import Receipt
from purveyor.model import json_fields
from purveyor.model.errors import InvalidInput
from purveyor.model.event import SUBJECT
from purveyor.queues.catalogue import incoming
from purveyor.queues.client import Queues
from purveyor.sources.http_events import NO_LOGIN, EventIntake, Incoming, check_size, trace_of
from purveyor.sources.schemas.cache import Book

if TYPE_CHECKING:
    from purveyor.jetstream import bulk

app = typer.Typer(rich_markup_mode=None, add_completion=False)
_LONGEST_LINE = 64 << 20


@dataclass(slots=True)
class Tally:
    """What became of the lines."""

    stored: int = 0
    duplicates: int = 0
    broken: int = 0
    position: int | None = None
    topics: set[tuple[str, str]] = field(default_factory=set)
    """Those that events were accepted for, with their realms."""


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
    realm: Annotated[str | None, typer.Option(metavar="REALM", help="Who speaks.")] = None,
    topic: Annotated[str | None, typer.Option(metavar="TOPIC", help="What it is about.")] = None,
    key: Annotated[str | None, typer.Option(metavar="KEY", help="Which object; default: found in it.")] = None,
    new: Annotated[str | None, typer.Option(metavar="JSON", help="The object as it is now.")] = None,
    old: Annotated[str | None, typer.Option(metavar="JSON", help="The object as it was.")] = None,
    attribute: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="An attribute; repeatable.")] = None,
    id_: Annotated[str | None, typer.Option("--id", metavar="ID", help="The id by which a repeat is known.")] = None,
    publisher: Annotated[str, typer.Option(metavar="NAME", help="Who publishes.")] = "purveyor",
    as_json: JsonFlag = False,
) -> None:
    """Publish an event from options, or many from a file with one JSON object on each line.

    A line is an event as the API takes it: realm, topic, body with old and new; and if wanted key, attributes, id,
    publisher_name and ts (default: now). A broken line is told with its number, and so is an event that does not fit
    the schema of its topic; the rest goes on.

    Exit codes: 0 all are stored; 1 some lines were broken, or an error.
    """
    cli = Cli.of(ctx, as_json)
    one = {"realm": realm, "topic": topic, "key": key, "new": new, "old": old, "attribute": attribute, "id": id_}
    given = [f"--{name}" for name, value in one.items() if value]
    if file is not None and given:
        raise InvalidInput(f"{', '.join(given)} and a file of events", fix="give one or the other")
    if file is None and not given:
        raise InvalidInput("nothing to publish", fix="give --realm, --topic and --new, or a file of events")
    if file is not None:
        tally = _many(cli, file, publisher)
        _tell(cli, tally)
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
    identity, receipt = cli.call(lambda queues: _one(queues, fields, publisher, replicas))
    _tell_one(cli, identity, receipt)


def read_event(fields: json_fields.Json, publisher: str, book: Book) -> Incoming:
    """An event with what was left out filled in; InvalidInput tells what cannot be filled in, or does not fit."""
    return Incoming.read({"publisher_name": publisher, "ts": utc_now().isoformat(), **fields}, book.rules)


async def _one(queues: Queues, fields: json_fields.Json, publisher: str, replicas: int) -> tuple[str, Receipt]:
    book = Book(queues, replicas=replicas)
    async with book.followed():
        given = read_event(fields, publisher, book)
        receipt = await EventIntake(queues, replicas=replicas).store(given, NO_LOGIN)
        await book.see({given.place})
    return given.id, receipt


def _many(cli: Cli, file: str, publisher: str) -> Tally:
    replicas = cli.settings().replicas
    tally = Tally()

    async def work(queues: Queues) -> None:
        from purveyor.jetstream import bulk  # noqa: PLC0415 - only here is it worth its time to import

        (await queues.ensure(incoming(), replicas=replicas)).require_usable()
        stop = threading.Event()
        book = Book(queues, replicas=replicas)
        async with book.followed():
            with _lines(file) as lines:
                try:
                    report = await queues.publish_many(
                        _messages(
                            lines,
                            partial(read_event, publisher=publisher, book=book),
                            queues.connection.max_payload,
                            tally,
                            stop,
                        ),
                        bulk.PublishOptions(expected_stream=incoming().stream),
                    )
                finally:
                    stop.set()  # after Ctrl-C the thread that reads would go on to the end
            await book.see(tally.topics)
        tally.stored, tally.duplicates = report.stored, report.duplicates
        tally.position = report.last_sequences.get(incoming().stream)

    cli.call(work)
    return tally


def _messages(
    lines: IO[bytes],
    read: Callable[[json_fields.Json], Incoming],
    max_payload: int,
    tally: Tally,
    stop: threading.Event,
) -> "Iterator[bulk.Outgoing]":
    for number, line in enumerate(iter(lambda: lines.readline(_LONGEST_LINE), b""), start=1):
        if stop.is_set():
            return
        if not line.strip():
            continue
        try:
            given = read(json_fields.parse(line, "line"))
            check_size(given, max_payload)
        except InvalidInput as error:
            tally.broken += 1
            note(f"line {number}: {error.message}")
            continue
        tally.topics.add(given.place)
        yield SUBJECT, given.data, given.headers(NO_LOGIN, trace_of(given)), given.message_id(NO_LOGIN)


@contextmanager
def _lines(file: str) -> Iterator[IO[bytes]]:
    if file == "-":
        yield sys.stdin.buffer
        return
    try:
        opened = Path(file).open("rb")  # noqa: SIM115 - closed below; what the caller does is no matter of the name
    except OSError as error:
        raise InvalidInput(f"the file {file} cannot be read: {error.strerror}", fix="check its name") from None
    with opened:
        yield opened


def _attribute(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidInput(f"invalid attribute {text!r}", fix="write --attribute NAME=VALUE")
    return name, value


def _tell_one(cli: Cli, identity: str, receipt: Receipt) -> None:
    if cli.json:
        write_json({"position": receipt.sequence, "id": identity, "duplicate": receipt.duplicate})
    else:
        again = ", a duplicate: not stored again" if receipt.duplicate else ""
        write(f"Published at position {receipt.sequence}{again}")


def _tell(cli: Cli, tally: Tally) -> None:
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
