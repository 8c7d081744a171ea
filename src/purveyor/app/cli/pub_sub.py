"""`purveyor pub` and `purveyor sub`: publish messages to subjects, and print messages of a subject or a stream.

`pub` publishes one message, or many from a template. `sub` prints messages as they arrive, or those of a stream through
an ephemeral consumer.
"""

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from purveyor.app.cli.context import Cli, JsonFlag, examples
from purveyor.app.cli.output import Advance, escape, progress, write, write_json, write_note
from purveyor.app.cli.parsers import parse_duration, parse_headers, parse_list, parse_start, utc_now
from purveyor.app.cli.render import write_line, write_object
from purveyor.jetstream.api import Receipt
from purveyor.jetstream.config import AckPolicy, ConsumerConfig, Deliver, Replay, Retention
from purveyor.jetstream.connection import RawMessage
from purveyor.jetstream.headers import MSG_ID, normalise
from purveyor.jetstream.messages import Message
from purveyor.jetstream.publisher import Expect
from purveyor.model.errors import InvalidInput, PurveyorError
from purveyor.model.name_rules import check_subject
from purveyor.queues.client import Queues

if TYPE_CHECKING:
    from purveyor.jetstream import bulk

pub_app = typer.Typer(rich_markup_mode=None, add_completion=False)
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


@pub_app.command(
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


sub_app = typer.Typer(rich_markup_mode=None, add_completion=False)
_INACTIVE_THRESHOLD = timedelta(seconds=30)
"""When the server removes the consumer of a `sub` that was killed."""


@dataclass(frozen=True, slots=True)
class StopRule:
    """When to stop: after a number of messages, or when none arrived for some time."""

    count: int | None
    wait_seconds: float | None


@sub_app.command(
    epilog=examples(
        "purveyor sub 'ORDERS.>'",
        "purveyor sub --stream ORDERS --deliver last",
        "purveyor sub --stream ORDERS --deliver 2m --replay original --timestamps",
        "purveyor sub --stream ORDERS --filter ORDERS.new --wait 1s --json",
    )
)
def sub(
    ctx: typer.Context,
    subject: Annotated[str | None, typer.Argument(metavar="SUBJECT", help="The subject to watch.")] = None,
    stream: Annotated[str | None, typer.Option(metavar="STREAM", help="Read this stream instead.")] = None,
    deliver: Annotated[
        str, typer.Option(metavar="START", help="all, last, new, subject, a sequence, 2m (ago), or a time.")
    ] = "all",
    filter_: Annotated[
        list[str] | None, typer.Option("--filter", metavar="SUBJECT", help="Only these subjects; repeatable.")
    ] = None,
    replay: Annotated[Replay, typer.Option(help="As fast as possible, or at the original pace.")] = Replay.INSTANT,
    count: Annotated[int | None, typer.Option(metavar="N", min=1, help="Stop after N messages.")] = None,
    wait: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Stop when no message arrives for this time.")
    ] = None,
    timestamps: Annotated[bool, typer.Option("--timestamps", "-t", help="Print when each message arrived.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Watch a subject, or read a stream through an ephemeral consumer. Ctrl-C ends it."""
    cli = Cli.of(ctx, as_json)
    stop_rule = StopRule(count, parse_duration(wait).total_seconds() if wait is not None else None)
    if (subject is None) == (stream is None):
        raise InvalidInput("give a subject to watch, or --stream with a name", fix="see purveyor sub --help")
    filters = parse_list(filter_)
    if stream is None and (filters or deliver != "all" or replay is not Replay.INSTANT):
        raise InvalidInput(
            "--deliver, --filter and --replay are for reading a stream", fix="add --stream with its name"
        )

    config = _config(deliver, filters, replay)

    async def watch(queues: Queues) -> None:
        source = _stored(queues, stream, config) if stream is not None else _live(queues, subject or "")
        # A bar only if the messages go to a file or a pipe: on one screen they would mix.
        with progress(f"reading {stream or subject}", count, visible=not sys.stdout.isatty()) as advance:
            await _print(cli, source, stop_rule, timestamps=timestamps, advance=advance)

    cli.call(watch)


def _config(deliver: str, filters: tuple[str, ...], replay: Replay) -> ConsumerConfig:
    """Return the config of a consumer without acknowledgements and without files on disk."""
    start = parse_start(deliver, utc_now())
    if start.policy is Deliver.LAST_PER_SUBJECT and not filters:
        filters = (">",)  # the server requires a filter
    return ConsumerConfig(
        deliver_policy=start.policy,
        opt_start_seq=start.sequence,
        opt_start_time=start.time,
        ack_policy=AckPolicy.NONE,
        replay_policy=replay,
        filter_subjects=filters or None,
        inactive_threshold=_INACTIVE_THRESHOLD,
        mem_storage=True,
        num_replicas=1,
    )


async def _live(queues: Queues, subject: str) -> AsyncGenerator[RawMessage | None]:
    """Yield None when the server delivers the subject to us, then its messages."""
    listening = await queues.connection.subscribe(check_subject(subject, wildcards=True), confirm=True)
    write_note(f"Listening on {subject}")
    try:
        yield None
        async for message in listening:
            yield message
    finally:
        await listening.close()


async def _stored(queues: Queues, stream: str, config: ConsumerConfig) -> AsyncGenerator[Message | None]:
    """Yield None when the consumer exists, then its messages."""
    if (await queues.streams.info(stream)).config.retention is Retention.WORK_QUEUE:
        raise InvalidInput(
            f"stream {stream!r} is a work queue: reading it removes its messages",
            fix="show single messages with `purveyor stream get`, or pull them with `purveyor consumer next`",
        )
    made = await queues.consumers.add(stream, config)
    write_note(f"Reading {stream} through consumer {made.name}")
    try:
        yield None
        async with contextlib.aclosing(queues.pull(stream, made.name)) as messages:
            async for message in messages:
                yield message
    finally:
        with contextlib.suppress(PurveyorError):  # the server removes it after _INACTIVE_THRESHOLD
            await queues.consumers.remove(stream, made.name)


async def _print(
    cli: Cli,
    source: AsyncGenerator[Message | None] | AsyncGenerator[RawMessage | None],
    stop_rule: StopRule,
    *,
    timestamps: bool,
    advance: Advance,
) -> None:
    number = 0
    async with contextlib.aclosing(source) as messages:
        await anext(messages)  # --wait counts from the moment when messages can arrive
        while stop_rule.count is None or number < stop_rule.count:
            try:
                message = await asyncio.wait_for(anext(messages), stop_rule.wait_seconds)
            except TimeoutError:
                return
            assert message is not None
            number += 1
            advance(1)
            if cli.json:
                write_object(message)
            else:
                write_line(number, message, timestamps=timestamps)
