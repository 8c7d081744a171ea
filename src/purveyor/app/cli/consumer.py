"""`purveyor consumer`: add, show, pause and remove consumers, pull messages by hand, and watch acknowledgements."""

import contextlib
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Annotated, assert_never

import typer

from purveyor.app.cli.context import Cli, ConsumerName, JsonFlag, StreamName, YesFlag, confirm, examples
from purveyor.app.cli.jetstream_text import consumer_text
from purveyor.app.cli.output import write, write_json, write_note
from purveyor.app.cli.parsers import parse_duration, parse_list, parse_moment, parse_start, utc_now
from purveyor.app.cli.render import format_duration, format_table, write_object, write_received
from purveyor.jetstream.config import AckPolicy, ConsumerConfig, ConsumerInfo, Deliver, Replay
from purveyor.jetstream.consumers import AckSample
from purveyor.jetstream.messages import Message
from purveyor.model.errors import InvalidInput, UnknownMessage
from purveyor.model.name_rules import check_subject
from purveyor.queues.client import Queues

app = typer.Typer(help="Add, show, read, pause and remove consumers.", rich_markup_mode=None, add_completion=False)


@app.command(
    "add",
    epilog=examples(
        "purveyor consumer add ORDERS DISPATCH --filter ORDERS.processed",
        "purveyor consumer add ORDERS LATE --deliver 2m --ack none",
        "purveyor consumer add ORDERS RETRY --max-deliver 4 --backoff 1s,5s,30s",
        "purveyor consumer add ORDERS MONITOR --target my.monitor --ack none --sample 100",
        "purveyor consumer add ORDERS --ephemeral --deliver last",
    ),
)
def add(
    ctx: typer.Context,
    stream: StreamName,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Its name; an ephemeral consumer needs none.")
    ] = None,
    filter_: Annotated[
        list[str] | None, typer.Option("--filter", metavar="SUBJECT", help="Only these subjects; a,b or repeated.")
    ] = None,
    ack: Annotated[AckPolicy, typer.Option(help="What must be acknowledged.")] = AckPolicy.EXPLICIT,
    deliver: Annotated[
        str, typer.Option(metavar="START", help="all, last, new, subject, a sequence, 2m (ago), or a time.")
    ] = "all",
    replay: Annotated[Replay, typer.Option(help="As fast as possible, or at the original pace.")] = Replay.INSTANT,
    wait: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Redeliver an unacknowledged message after this time.")
    ] = None,
    max_deliver: Annotated[int | None, typer.Option(metavar="N", help="Most deliveries of a message.")] = None,
    backoff: Annotated[
        str | None, typer.Option(metavar="1s,5s,30s", help="The delay after each delivery, instead of --wait.")
    ] = None,
    max_pending: Annotated[
        int | None, typer.Option(metavar="N", help="Most unacknowledged messages at a time.")
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(metavar="PERCENT", min=1, max=100, help="Publish samples of this share of acknowledgements."),
    ] = None,
    headers_only: Annotated[bool, typer.Option("--headers-only", help="Deliver headers without payloads.")] = False,
    target: Annotated[str | None, typer.Option(metavar="SUBJECT", help="Push to this subject.")] = None,
    pull: Annotated[bool, typer.Option("--pull", help="Deliver on request (the default).")] = False,
    ephemeral: Annotated[bool, typer.Option("--ephemeral", help="The server removes it when it is unused.")] = False,
    inactive_threshold: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Remove an ephemeral consumer when it is unused this long.")
    ] = None,
    description: Annotated[str | None, typer.Option(metavar="TEXT", help="A description.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Add a consumer. Adding it again changes nothing; the same name with other settings is an error."""
    if pull and target is not None:
        raise InvalidInput("--pull and --target exclude each other", fix="leave one of them out")
    if name is None and not ephemeral:
        raise InvalidInput("a durable consumer needs a name", fix="give one, or --ephemeral")
    if target is not None:
        check_subject(target)
    start = parse_start(deliver, utc_now())
    filters = parse_list(filter_)
    if start.policy is Deliver.LAST_PER_SUBJECT and not filters:
        filters = (">",)  # the server requires a filter
    config = ConsumerConfig(
        name=name,
        durable_name=None if ephemeral else name,
        description=description,
        deliver_policy=start.policy,
        opt_start_seq=start.sequence,
        opt_start_time=start.time,
        ack_policy=ack,
        ack_wait=_duration(wait),
        max_deliver=max_deliver if max_deliver is not None else -1,
        backoff=tuple(parse_duration(part) for part in parse_list([backoff] if backoff else [])),
        filter_subject=filters[0] if len(filters) == 1 else None,
        filter_subjects=filters if len(filters) > 1 else None,
        replay_policy=replay,
        sample_freq=f"{sample}%" if sample is not None else None,
        max_ack_pending=max_pending,
        headers_only=headers_only,
        deliver_subject=target,
        inactive_threshold=_duration(inactive_threshold),
    ).validated()
    cli = Cli.of(ctx, as_json)
    _show(cli, cli.call(lambda queues: queues.consumers.add(stream, config)))


@app.command("ls", epilog=examples("purveyor consumer ls ORDERS", "purveyor consumer ls ORDERS --json"))
def ls(ctx: typer.Context, stream: StreamName, as_json: JsonFlag = False) -> None:
    """List the consumers of a stream."""
    cli = Cli.of(ctx, as_json)
    found = cli.call(lambda queues: queues.consumers.list(stream))
    if cli.json:
        write_json(found, indent=2)
        return
    rows = [
        (
            info.name,
            "push" if info.config.deliver_subject else "pull",
            info.config.filters or "all",
            info.config.ack_policy,
            info.delivered.stream_seq,
            info.ack_floor.stream_seq,
            info.num_ack_pending,
            info.num_redelivered,
            info.num_pending,
        )
        for info in found
    ]
    columns = ("NAME", "KIND", "FILTER", "ACK", "DELIVERED", "FLOOR", "PENDING", "REDELIVERED", "UNPROCESSED")
    write(format_table(columns, rows, wrap=("FILTER",)))


@app.command("info", epilog=examples("purveyor consumer info ORDERS DISPATCH"))
def info_(ctx: typer.Context, stream: StreamName, name: ConsumerName, as_json: JsonFlag = False) -> None:
    """Show the settings and the position of a consumer."""
    cli = Cli.of(ctx, as_json)
    _show(cli, cli.call(lambda queues: queues.consumers.info(stream, name)))


@app.command(
    "pause",
    epilog=examples(
        "purveyor consumer pause ORDERS DISPATCH 10m",
        "purveyor consumer pause ORDERS DISPATCH 2030-01-01T00:00:00Z",
    ),
)
def pause(
    ctx: typer.Context,
    stream: StreamName,
    name: ConsumerName,
    until: Annotated[str, typer.Argument(metavar="DURATION|TIME", help="For how long, or until when.")],
    as_json: JsonFlag = False,
) -> None:
    """Stop deliveries for a time."""
    cli = Cli.of(ctx, as_json)
    moment = parse_moment(until, utc_now())
    cli.call(lambda queues: queues.consumers.pause(stream, name, moment))
    about = {"stream": stream, "consumer": name, "paused_until": moment}
    write_json(about) if cli.json else write(f"Paused {name} of {stream} until {moment:%Y-%m-%d %H:%M:%S %Z}")


@app.command("resume", epilog=examples("purveyor consumer resume ORDERS DISPATCH"))
def resume(ctx: typer.Context, stream: StreamName, name: ConsumerName, as_json: JsonFlag = False) -> None:
    """Resume deliveries after a pause."""
    cli = Cli.of(ctx, as_json)
    cli.call(lambda queues: queues.consumers.resume(stream, name))
    write_json({"stream": stream, "consumer": name}) if cli.json else write(f"Resumed {name} of {stream}")


@app.command("rm", epilog=examples("purveyor consumer rm ORDERS DISPATCH --yes"))
def rm(
    ctx: typer.Context, stream: StreamName, name: ConsumerName, yes: YesFlag = False, as_json: JsonFlag = False
) -> None:
    """Remove a consumer."""
    confirm(f"Remove consumer {name} of stream {stream}?", yes=yes)
    cli = Cli.of(ctx, as_json)
    cli.call(lambda queues: queues.consumers.remove(stream, name))
    about = {"stream": stream, "consumer": name, "removed": True}
    write_json(about) if cli.json else write(f"Removed {name} of {stream}")


@app.command(
    "samples",
    epilog=examples(
        "purveyor consumer samples ORDERS DISPATCH", "purveyor consumer samples ORDERS DISPATCH --count 10"
    ),
)
def samples(
    ctx: typer.Context,
    stream: StreamName,
    name: ConsumerName,
    count: Annotated[int | None, typer.Option(metavar="N", min=1, help="Stop after N samples.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show sampled acknowledgements as they happen, for a consumer with --sample. Ctrl-C ends it."""
    cli = Cli.of(ctx, as_json)

    async def watch(queues: Queues) -> None:
        config = (await queues.consumers.info(stream, name)).config
        if not config.sample_freq:
            raise InvalidInput(
                f"consumer {name!r} of stream {stream!r} takes no samples", fix="add it with --sample 100"
            )

        def ready() -> None:
            write_note(f"Waiting for samples of {name} on {stream}")

        seen = 0
        async with contextlib.aclosing(queues.consumers.samples(stream, name, on_ready=ready)) as taken:
            async for sample in taken:
                write_json(sample) if cli.json else write(_sample_line(sample))
                seen += 1
                if seen == count:
                    return

    cli.call(watch)


def _sample_line(sample: AckSample) -> str:
    return (
        f"sequence {sample.sequence}: acknowledged after {format_duration(sample.delay)}, "
        f"delivery {sample.deliveries}, consumer sequence {sample.consumer_sequence}"
    )


def _duration(text: str | None) -> timedelta | None:
    return parse_duration(text) if text is not None else None


def _show(cli: Cli, info: ConsumerInfo) -> None:
    write_json(info, indent=2) if cli.json else write(consumer_text(info))


class Answer(Enum):
    """An answer to a message."""

    ACK = "ack"
    NAK = "nak"
    PROGRESS = "progress"
    NEXT = "next"
    TERM = "term"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class PullOptions:
    """The messages to pull."""

    stream: str
    consumer: str
    count: int
    wait: timedelta


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer with its options."""

    answer: Answer
    delay: timedelta | None = None
    reason: str = ""
    confirm: bool = False

    def __post_init__(self) -> None:
        if self.delay is not None and self.answer is not Answer.NAK:
            raise InvalidInput("--delay is for --answer nak", fix="add --answer nak, or leave out --delay")
        if self.reason and self.answer is not Answer.TERM:
            raise InvalidInput("--reason is for --answer term", fix="add --answer term, or leave out --reason")
        if self.confirm and self.answer in (Answer.NEXT, Answer.NONE):
            raise InvalidInput(f"an answer of {self.answer.value!r} cannot be confirmed", fix="leave out --confirm")

    def describe(self) -> str:
        """Describe the answer that was sent."""
        confirmed = ", confirmed by the server" if self.confirm else ""
        match self.answer:
            case Answer.ACK | Answer.NEXT:
                return f"Acknowledged message{confirmed}"
            case Answer.NAK:
                when = f", redelivery after {format_duration(self.delay)}" if self.delay else ", redelivery at once"
                return f"Nacked message{when}{confirmed}"
            case Answer.PROGRESS:
                return f"Extended the ack deadline{confirmed}"
            case Answer.TERM:
                return f"Terminated message{f': {self.reason}' if self.reason else ''}{confirmed}"
            case Answer.NONE:
                return ""
            case never:
                assert_never(never)


async def send_answer(reply: Reply, message: Message) -> None:
    """Answer a message; `_pull` handles NEXT, which also asks for another message."""
    match reply.answer:
        case Answer.ACK:
            await message.ack(confirm=reply.confirm)
        case Answer.NAK:
            await message.nak(delay=reply.delay, confirm=reply.confirm)
        case Answer.PROGRESS:
            await message.in_progress(confirm=reply.confirm)
        case Answer.TERM:
            await message.term(reply.reason, confirm=reply.confirm)
        case Answer.NONE | Answer.NEXT:
            pass
        case never:
            assert_never(never)


@app.command(
    "next",
    epilog=examples(
        "purveyor consumer next ORDERS DISPATCH",
        "purveyor consumer next ORDERS DISPATCH --count 10 --wait 1s",
        "purveyor consumer next ORDERS DISPATCH --answer nak --delay 5s",
        "purveyor consumer next ORDERS DISPATCH --answer term --reason 'no such customer'",
        "purveyor consumer next ORDERS DISPATCH --confirm",
    ),
)
def next_(
    ctx: typer.Context,
    stream: StreamName,
    name: ConsumerName,
    count: Annotated[int, typer.Option(metavar="N", min=1, help="Number of messages.")] = 1,
    wait: Annotated[str, typer.Option(metavar="DURATION", help="How long to wait for messages.")] = "5s",
    ack: Annotated[
        bool, typer.Option("--ack/--no-ack", help="Acknowledge the messages, or leave them unanswered.")
    ] = True,
    answer: Annotated[Answer | None, typer.Option(help="The answer; default: ack.")] = None,
    delay: Annotated[str | None, typer.Option(metavar="DURATION", help="With nak: redeliver after this time.")] = None,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="With term: the reason.")] = "",
    confirm: Annotated[bool, typer.Option("--confirm", help="Wait until the server confirms the answer.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Pull the next messages of a consumer and answer them."""
    cli = Cli.of(ctx, as_json)
    chosen = answer or (Answer.ACK if ack else Answer.NONE)
    reply = Reply(chosen, parse_duration(delay) if delay is not None else None, reason, confirm)
    options = PullOptions(stream, name, count, parse_duration(wait))
    cli.call(lambda queues: _pull(queues, cli, options, reply))


async def _pull(queues: Queues, cli: Cli, options: PullOptions, reply: Reply) -> None:
    who = f"consumer {options.consumer!r} of stream {options.stream!r}"
    config = (await queues.consumers.info(options.stream, options.consumer)).config
    if config.deliver_subject:
        raise InvalidInput(
            f"{who} pushes to {config.deliver_subject!r}", fix=f"watch it with: purveyor sub {config.deliver_subject}"
        )
    if config.ack_policy is AckPolicy.NONE:
        if reply.confirm or reply.answer not in (Answer.ACK, Answer.NONE):
            raise InvalidInput(
                f"{who} needs no answers: its ack policy is none", fix="leave out --answer and --confirm"
            )
        reply = Reply(Answer.NONE)
    seconds = options.wait.total_seconds()
    got = await queues.fetch(options.stream, options.consumer, options.count, wait_seconds=seconds)
    if not got:
        raise UnknownMessage(
            f"no message for {who} within {format_duration(options.wait)}",
            fix="publish one, or wait longer with --wait",
        )
    for message in got:
        await _answer(cli, message, reply)
        if reply.answer is Answer.NEXT:
            following = await message.ack_next(wait_seconds=seconds)
            if following is not None:
                await _answer(cli, following, Reply(Answer.NONE))


async def _answer(cli: Cli, message: Message, reply: Reply) -> None:
    if not cli.json:
        write_received(message)
    await send_answer(reply, message)
    if cli.json:
        write_object(message, answer=reply.answer, confirmed=reply.confirm)
    elif reply.describe():
        write(f"\n{reply.describe()}")
