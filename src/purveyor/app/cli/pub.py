"""`purveyor pub`: publish a message, or many from a template."""

import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from purveyor.app.cli.context import Cli, JsonFlag, examples
from purveyor.app.cli.output import escape, progress, write, write_json
from purveyor.app.cli.parsers import parse_headers
from purveyor.jetstream.api_protocol import Receipt
from purveyor.jetstream.headers import MSG_ID, normalise
from purveyor.jetstream.publisher import Expect
from purveyor.model.errors import InvalidInput
from purveyor.model.name_rules import check_subject
from purveyor.queues.client import Queues

if TYPE_CHECKING:
    from purveyor.jetstream import bulk

app = typer.Typer(rich_markup_mode=None, add_completion=False)
_COUNT = "{{Count}}"
_MAX_SINGLE_PUBLISHES = 1000


@dataclass(frozen=True, slots=True)
class Stored:
    """The result of publishing many messages."""

    stored: int
    duplicates: int
    last_sequences: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Template:
    """A template of messages; `{{Count}}` in the body or id becomes the number of the message, from 1."""

    subject: str
    body: bytes
    headers: dict[str, tuple[str, ...]]
    msg_id: str | None

    def data_of(self, number: int) -> bytes:
        """Return the payload of one message."""
        return self.body.replace(_COUNT.encode(), str(number).encode())

    def id_of(self, number: int) -> str | None:
        """Return the id of one message."""
        return None if self.msg_id is None else self.msg_id.replace(_COUNT, str(number))

    def messages(self, count: int, stop: threading.Event) -> "Iterator[bulk.Outgoing]":
        """Yield all messages, until `stop` is set."""
        for number in range(1, count + 1):
            if stop.is_set():
                return
            yield self.subject, self.data_of(number), self.headers, self.id_of(number)


@app.command(
    epilog=examples(
        "purveyor pub ORDERS.new 'order 1'",
        "purveyor pub ORDERS.new -H Trace:7 -H Tag:a -H Tag:b --msg-id order-1 'order 1'",
        "purveyor pub ORDERS.new 'order {{Count}}' --count 100 --msg-id 'order-{{Count}}'",
        "cat order.json | purveyor pub ORDERS.new -",
    )
)
def pub(
    ctx: typer.Context,
    subject: Annotated[str, typer.Argument(metavar="SUBJECT", help="The subject.")],
    body: Annotated[str | None, typer.Argument(metavar="BODY", help="The payload; - reads standard input.")] = None,
    header: Annotated[
        list[str] | None, typer.Option("--header", "-H", metavar="NAME:VALUE", help="A header; repeatable.")
    ] = None,
    msg_id: Annotated[
        str | None, typer.Option(metavar="ID", help="The id by which the server recognises repeats.")
    ] = None,
    count: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of messages; {{Count}} becomes the number of each.")
    ] = 1,
    no_ack: Annotated[
        bool, typer.Option("--no-ack", help="Do not wait for the acknowledgement of the server.")
    ] = False,
    file: Annotated[Path | None, typer.Option(metavar="FILE", help="Read the payload from a file.")] = None,
    expect_last_sequence: Annotated[
        int | None, typer.Option(metavar="SEQ", help="Store only if this is the stream's last sequence.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Publish messages, and print where they are stored.

    More than 1000 messages without --msg-id get generated ids, so that a broken connection stores none twice.
    """
    cli = Cli.of(ctx, as_json)
    if count > 1 and expect_last_sequence is not None:
        raise InvalidInput("--expect-last-sequence is for one message", fix="leave out --count")
    if no_ack and expect_last_sequence is not None:
        raise InvalidInput(
            "--expect-last-sequence needs the acknowledgement that --no-ack does not wait for",
            fix="leave one of them out",
        )
    template = Template(check_subject(subject), _payload(body, file), normalise(parse_headers(header or [])), msg_id)
    if no_ack:
        cli.call(lambda queues: _send(queues, template, count))
        _print_result(
            cli,
            {"subject": subject, "messages": count, "acknowledged": False},
            f"Sent {count} to {subject}, without acknowledgement",
        )
    elif count == 1:
        expect = Expect(last_sequence=expect_last_sequence) if expect_last_sequence is not None else None
        _print_one(cli, template, cli.call(lambda queues: _store(queues, template, 1, expect)))
    else:
        _publish_many(cli, template, count)


def _payload(body: str | None, file: Path | None) -> bytes:
    if body is not None and file is not None:
        raise InvalidInput("a payload and --file exclude each other", fix="give one of them")
    if file is not None:
        try:
            return file.read_bytes()
        except OSError as error:
            raise InvalidInput(f"the file {file} cannot be read: {error.strerror}", fix="check --file") from None
    if body == "-":
        return sys.stdin.buffer.read()
    return (body or "").encode("utf-8", "surrogateescape")


async def _store(queues: Queues, template: Template, number: int, expect: Expect | None) -> Receipt:
    return await queues.publish(
        template.subject,
        template.data_of(number),
        headers=template.headers,
        msg_id=template.id_of(number),
        expect=expect,
    )


async def _send(queues: Queues, template: Template, count: int) -> None:
    with progress(f"publishing to {template.subject}", count, visible=count > 1) as advance:
        for number in range(1, count + 1):
            msg_id = template.id_of(number)
            headers = template.headers | (normalise({MSG_ID: msg_id}) if msg_id is not None else {})
            await queues.connection.publish(template.subject, template.data_of(number), headers=headers)
            advance(1)
    await queues.connection.flush()


async def _store_many(queues: Queues, template: Template, count: int) -> Stored:
    """Publish a few messages without ids one by one; more through the bulk path, which gives each an id."""
    with progress(f"publishing to {template.subject}", count) as advance:
        if count <= _MAX_SINGLE_PUBLISHES and template.msg_id is None:
            for number in range(1, count + 1):
                receipt = await _store(queues, template, number, None)
                advance(1)
            return Stored(count, 0, {receipt.stream: receipt.sequence})
        from purveyor.jetstream import bulk  # noqa: PLC0415 - a slow import that only this branch needs

        stop = threading.Event()
        reported = 0

        def on_progress(acknowledged: int) -> None:
            nonlocal reported
            advance(acknowledged - reported)
            reported = acknowledged

        options = bulk.PublishOptions(on_progress=on_progress)
        try:
            report = await queues.publish_many(template.messages(count, stop), options)
            return Stored(report.stored, report.duplicates, report.last_sequences)
        finally:
            stop.set()  # after Ctrl-C the thread that sends would otherwise send everything


def _print_one(cli: Cli, template: Template, receipt: Receipt) -> None:
    again = ", a duplicate: not stored again" if receipt.duplicate else ""
    about = {"stream": receipt.stream, "sequence": receipt.sequence, "duplicate": receipt.duplicate}
    _print_result(
        cli,
        {"subject": template.subject, **about},
        f"Published {len(template.data_of(1))} bytes to {escape(template.subject)}: "
        f"stream {escape(receipt.stream)}, sequence {receipt.sequence}{again}",
    )


def _publish_many(cli: Cli, template: Template, count: int) -> None:
    report = cli.call(lambda queues: _store_many(queues, template, count))
    last = ", ".join(f"stream {escape(stream)}, last sequence {seq}" for stream, seq in report.last_sequences.items())
    duplicates = f"; {report.duplicates} were duplicates: not stored again" if report.duplicates else ""
    _print_result(
        cli,
        {
            "subject": template.subject,
            "messages": count,
            "stored": report.stored,
            "duplicates": report.duplicates,
            "last_sequences": report.last_sequences,
        },
        f"Published {count} messages to {escape(template.subject)}: {last}{duplicates}",
    )


def _print_result(cli: Cli, fields: dict[str, object], text: str) -> None:
    write_json(fields) if cli.json else write(text)
