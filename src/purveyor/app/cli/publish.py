"""`purveyor publish`: store events in `incoming`, one from options or many from lines of JSON."""

import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, TypeVar

import typer

from purveyor.app.cli.backends.api_access import call_backend
from purveyor.app.cli.backends.event_backend import DirectEvents, Events, RemoteEvents, Tally, with_defaults
from purveyor.app.cli.context import Cli, JsonFlag, examples
from purveyor.app.cli.output import write, write_json
from purveyor.model import json_fields
from purveyor.model.errors import InvalidInput
from purveyor.model.json_fields import Json

T = TypeVar("T")
app = typer.Typer(rich_markup_mode=None, add_completion=False)


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
        with _lines(file) as lines:
            tally = _call(cli, lambda events: events.publish_lines(lines, publisher))
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
    _print_one(cli, _call(cli, lambda events: events.publish(with_defaults(fields, publisher))))


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


def _print_one(cli: Cli, receipt: Json) -> None:
    if cli.json:
        write_json(receipt)
    else:
        again = ", a duplicate: not stored again" if receipt["duplicate"] else ""
        write(f"Published at position {receipt['position']}{again}")


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


def _call(cli: Cli, work: Callable[[Events], Awaitable[T]]) -> T:
    return call_backend(cli, DirectEvents.open, RemoteEvents, work)
