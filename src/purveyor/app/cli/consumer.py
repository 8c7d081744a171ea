"""`purveyor consumer`: make, look at, pause, remove consumers, and watch how quickly they acknowledge."""

import contextlib
from datetime import timedelta
from typing import Annotated

import typer

from purveyor.app.cli import consumer_next
from purveyor.app.cli.context import Cli, ConsumerName, JsonFlag, StreamName, YesFlag, confirm, examples
from purveyor.app.cli.jetstream_text import consumer_text
from purveyor.app.cli.parsers import parse_duration, parse_list, parse_moment, parse_start, utc_now
from purveyor.app.cli.render import note, show_duration, table, write, write_json
from purveyor.jetstream.config import AckPolicy, ConsumerConfig, ConsumerInfo, Deliver, Replay
from purveyor.jetstream.consumers import AckSample
from purveyor.model.errors import InvalidInput
from purveyor.model.name_rules import check_subject
from purveyor.queues.client import Queues

app = typer.Typer(
    help="Make, look at, read from, pause and remove consumers.", rich_markup_mode=None, add_completion=False
)
consumer_next.register(app)


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
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Its name; without one it is ephemeral.")] = None,
    filter_: Annotated[
        list[str] | None, typer.Option("--filter", metavar="SUBJECT", help="Only these; a,b or repeated.")
    ] = None,
    ack: Annotated[AckPolicy, typer.Option(help="What must be acknowledged.")] = AckPolicy.EXPLICIT,
    deliver: Annotated[
        str, typer.Option(metavar="START", help="all, last, new, subject, a sequence, 2m (ago), or a time.")
    ] = "all",
    replay: Annotated[Replay, typer.Option(help="At once, or at the pace they came in.")] = Replay.INSTANT,
    wait: Annotated[
        str | None, typer.Option(metavar="DURATION", help="When an unacknowledged message comes again.")
    ] = None,
    max_deliver: Annotated[int | None, typer.Option(metavar="N", help="How often at most.")] = None,
    backoff: Annotated[
        str | None, typer.Option(metavar="1s,5s,30s", help="The wait after each delivery, instead of --wait.")
    ] = None,
    max_pending: Annotated[int | None, typer.Option(metavar="N", help="How many unacknowledged at once.")] = None,
    sample: Annotated[
        int | None, typer.Option(metavar="PERCENT", min=1, max=100, help="Publish samples of acknowledgements.")
    ] = None,
    headers_only: Annotated[bool, typer.Option("--headers-only", help="Deliver no payloads.")] = False,
    target: Annotated[str | None, typer.Option(metavar="SUBJECT", help="Push to this subject.")] = None,
    pull: Annotated[bool, typer.Option("--pull", help="Wait to be asked (the default).")] = False,
    ephemeral: Annotated[bool, typer.Option("--ephemeral", help="Vanishes when nobody uses it.")] = False,
    inactive_threshold: Annotated[
        str | None, typer.Option(metavar="DURATION", help="When an unused one vanishes.")
    ] = None,
    description: Annotated[str | None, typer.Option(metavar="TEXT", help="What it is for.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a consumer. The same again is fine; the same name with other settings is an error."""
    if pull and target is not None:
        raise InvalidInput("--pull and --target exclude each other", fix="drop one")
    if name is None and not ephemeral:
        raise InvalidInput("a durable consumer needs a name", fix="give one, or --ephemeral")
    if target is not None:
        check_subject(target)
    start = parse_start(deliver, utc_now())
    filters = parse_list(filter_)
    if start.policy is Deliver.LAST_PER_SUBJECT and not filters:
        filters = (">",)  # the server wants one said
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
    ).checked()
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
    write(table(columns, rows, wrap=("FILTER",)))


@app.command("info", epilog=examples("purveyor consumer info ORDERS DISPATCH"))
def info_(ctx: typer.Context, stream: StreamName, name: ConsumerName, as_json: JsonFlag = False) -> None:
    """Show its settings and where it is."""
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
    until: Annotated[str, typer.Argument(metavar="DURATION|TIME", help="How long, or until when.")],
    as_json: JsonFlag = False,
) -> None:
    """Deliver nothing for a while."""
    cli = Cli.of(ctx, as_json)
    moment = parse_moment(until, utc_now())
    cli.call(lambda queues: queues.consumers.pause(stream, name, moment))
    about = {"stream": stream, "consumer": name, "paused_until": moment}
    write_json(about) if cli.json else write(f"Paused {name} of {stream} until {moment:%Y-%m-%d %H:%M:%S %Z}")


@app.command("resume", epilog=examples("purveyor consumer resume ORDERS DISPATCH"))
def resume(ctx: typer.Context, stream: StreamName, name: ConsumerName, as_json: JsonFlag = False) -> None:
    """End a pause."""
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
            note(f"Waiting for samples of {name} on {stream}")

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
        f"sequence {sample.sequence}: acknowledged after {show_duration(sample.delay)}, "
        f"delivery {sample.deliveries}, consumer sequence {sample.consumer_sequence}"
    )


def _duration(text: str | None) -> timedelta | None:
    return parse_duration(text) if text is not None else None


def _show(cli: Cli, info: ConsumerInfo) -> None:
    write_json(info, indent=2) if cli.json else write(consumer_text(info))
