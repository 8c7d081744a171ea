"""`purveyor sub`: print messages of a subject as they arrive, or of a stream through an ephemeral consumer."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated

import typer

from purveyor.app.cli.context import Cli, JsonFlag, examples
from purveyor.app.cli.output import Advance, progress, write_note
from purveyor.app.cli.parsers import parse_duration, parse_list, parse_start, utc_now
from purveyor.app.cli.render import write_line, write_object
from purveyor.jetstream.config import AckPolicy, ConsumerConfig, Deliver, Replay, Retention
from purveyor.jetstream.connection import RawMessage
from purveyor.jetstream.messages import Message
from purveyor.model.errors import InvalidInput, PurveyorError
from purveyor.model.name_rules import check_subject
from purveyor.queues.client import Queues

app = typer.Typer(rich_markup_mode=None, add_completion=False)
_INACTIVE_THRESHOLD = timedelta(seconds=30)
"""When the server removes the consumer of a `sub` that was killed."""


@dataclass(frozen=True, slots=True)
class StopRule:
    """When to stop: after a number of messages, or when none arrived for some time."""

    count: int | None
    wait_seconds: float | None


@app.command(
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
