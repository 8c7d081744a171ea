"""`purveyor publish`: events into `incoming`, one from options or many from lines of JSON."""

import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from purveyor.app.cli.context import Cli, JsonFlag, examples
from purveyor.app.cli.render import note, write, write_json
from purveyor.app.cli.values import utc_now
from purveyor.intake.schemas.book import Book
from purveyor.model import jsontext
from purveyor.model.errors import InvalidInput
from purveyor.model.event import SUBJECT
from purveyor.model.names import check_header
from purveyor.queues.catalogue import incoming
from purveyor.queues.client import Queues
from purveyor.queues.headers import MSG_ID
from purveyor.queues.publisher import Expect, Receipt

if TYPE_CHECKING:
    from purveyor.queues import bulk

app = typer.Typer(rich_markup_mode=None, add_completion=False)
_HEADER_ROOM = 1024
_LONGEST_LINE = 64 << 20


@dataclass(frozen=True, slots=True)
class Addressed:
    """An event and the id that a repetition of it has."""

    id: str
    data: bytes
    topic: tuple[str, str]
    """With its realm."""


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
        "body": {side: jsontext.parse(text, f"{side} object") for side, text in (("new", new), ("old", old)) if text},
        "attributes": dict(map(_attribute, attribute or [])),
        **{name: value for name, value in (("key", key), ("id", id_)) if value is not None},
    }
    replicas = cli.settings().replicas
    identity, receipt = cli.call(lambda queues: _one(queues, fields, publisher, replicas))
    _tell_one(cli, identity, receipt)


def read_event(fields: jsontext.Json, publisher: str, book: Book) -> Addressed:
    """An event with what was left out filled in; InvalidInput tells what cannot be filled in, or does not fit."""
    rest = {"publisher_name": publisher, "ts": utc_now().isoformat(), **fields}
    identity = rest.pop("id", None)
    if identity is None:
        identity = str(uuid.uuid4())
    elif not isinstance(identity, str) or not identity:
        raise InvalidInput(f"the event has {jsontext.kind(identity)} as 'id'", fix="give 'id' as a string")
    check_header(MSG_ID, identity)
    event = book.rules.read(rest)
    return Addressed(identity, event.encode(), (event.realm, event.topic))


async def _one(queues: Queues, fields: jsontext.Json, publisher: str, replicas: int) -> tuple[str, Receipt]:
    book = Book(queues, replicas=replicas)
    async with book.followed():
        event = read_event(fields, publisher, book)
        receipt = await _store(queues, event, replicas)
        await book.see({event.topic})
    return event.id, receipt


async def _store(queues: Queues, event: Addressed, replicas: int) -> Receipt:
    queue = incoming()
    (await queues.ensure(queue, replicas=replicas)).require_usable()
    return await queues.publish(SUBJECT, event.data, msg_id=event.id, expect=Expect(stream=queue.stream))


def _many(cli: Cli, file: str, publisher: str) -> Tally:
    replicas = cli.settings().replicas
    tally = Tally()

    async def work(queues: Queues) -> None:
        from purveyor.queues import bulk  # noqa: PLC0415 - only here is it worth its time to import

        (await queues.ensure(incoming(), replicas=replicas)).require_usable()
        largest = queues.connection.max_payload - _HEADER_ROOM
        stop = threading.Event()
        book = Book(queues, replicas=replicas)
        async with book.followed():
            with _lines(file) as lines:
                try:
                    report = await queues.publish_many(
                        _messages(lines, partial(read_event, publisher=publisher, book=book), largest, tally, stop),
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
    lines: IO[bytes], read: Callable[[jsontext.Json], Addressed], largest: int, tally: Tally, stop: threading.Event
) -> "Iterator[bulk.Outgoing]":
    for number, line in enumerate(iter(lambda: lines.readline(_LONGEST_LINE), b""), start=1):
        if stop.is_set():
            return
        if not line.strip():
            continue
        try:
            event = read(jsontext.parse(line, "line"))
            if len(event.data) > largest:
                raise InvalidInput(f"{len(event.data)} bytes are more than the server takes")
        except InvalidInput as error:
            tally.broken += 1
            note(f"line {number}: {error.message}")
            continue
        tally.topics.add(event.topic)
        yield SUBJECT, event.data, None, event.id


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
