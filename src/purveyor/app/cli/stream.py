"""`purveyor stream`: add, show, edit, purge, seal and remove streams, and show stored messages."""

from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any

import typer

from purveyor.app.cli.context import Cli, JsonFlag, StreamName, YesFlag, confirm, examples
from purveyor.app.cli.jetstream_text import compute_cost, cost_json, stream_text
from purveyor.app.cli.output import escape, progress, to_jsonable, write, write_bytes, write_json
from purveyor.app.cli.parsers import parse_duration, parse_list, parse_size
from purveyor.app.cli.render import format_payload, format_size, format_table, format_time, payload_fields
from purveyor.jetstream.config import (
    Compression,
    Discard,
    Retention,
    Storage,
    StreamConfig,
    StreamInfo,
)
from purveyor.jetstream.streams import StoredMessage
from purveyor.model.errors import InvalidInput
from purveyor.queues.client import Queues

app = typer.Typer(help="Add, show, edit, purge, seal and remove streams.", rich_markup_mode=None, add_completion=False)
_MAX_COUNTED_SUBJECTS = 10_000


class RetentionName(Enum):
    """Retention policies by their short names."""

    LIMITS = "limits"
    INTEREST = "interest"
    WORK = "work"

    @property
    def policy(self) -> Retention:
        """Return the policy of the server."""
        return Retention.WORK_QUEUE if self is RetentionName.WORK else Retention(self.value)


Subjects = Annotated[
    list[str] | None, typer.Option("--subjects", "-s", metavar="SUBJECT", help="Its subjects; a,b or repeated.")
]
RetentionOption = Annotated[
    RetentionName | None, typer.Option("--retention", help="When the server removes a message.")
]
DiscardOption = Annotated[
    Discard | None, typer.Option("--discard", help="What the server discards at a limit: old or new messages.")
]
PerSubject = Annotated[bool | None, typer.Option("--discard-per-subject", help="Refuse new messages per subject.")]
MaxMsgs = Annotated[int | None, typer.Option("--max-msgs", metavar="N", help="Most messages to keep.")]
MaxBytes = Annotated[str | None, typer.Option("--max-bytes", metavar="SIZE", help="Most bytes to keep, such as 1GiB.")]
MaxAge = Annotated[
    str | None, typer.Option("--max-age", metavar="DURATION", help="How long to keep messages, such as 7d.")
]
MaxMsgSize = Annotated[str | None, typer.Option("--max-msg-size", metavar="SIZE", help="Largest message.")]
MaxPerSubject = Annotated[
    int | None, typer.Option("--max-msgs-per-subject", metavar="N", help="Most messages per subject.")
]
Window = Annotated[
    str | None, typer.Option("--dupe-window", metavar="DURATION", help="How long the server remembers message ids.")
]
StorageOption = Annotated[Storage, typer.Option("--storage", help="Where the server stores messages.")]
Replicas = Annotated[int | None, typer.Option("--replicas", metavar="N", help="Replicas in a cluster.")]
NoAck = Annotated[bool | None, typer.Option("--no-ack", help="Do not acknowledge publishes.")]
Description = Annotated[str | None, typer.Option("--description", metavar="TEXT", help="A description.")]
Direct = Annotated[bool | None, typer.Option("--allow-direct/--no-allow-direct", help="Allow reads from any replica.")]
Atomic = Annotated[bool | None, typer.Option("--allow-atomic/--no-allow-atomic", help="Allow all-or-nothing batches.")]
CompressionOption = Annotated[Compression | None, typer.Option("--compression", help="Compression of blocks on disk.")]


def _settings(**given: Any) -> dict[str, Any]:
    """Convert the flags that were given to fields of StreamConfig."""
    parsers: dict[str, Callable[[Any], Any]] = {
        "max_bytes": parse_size,
        "max_msg_size": parse_size,
        "max_age": parse_duration,
        "duplicate_window": parse_duration,
        "subjects": parse_list,
        "retention": lambda name: name.policy,
    }
    return {
        field: parsers[field](value) if field in parsers else value
        for field, value in given.items()
        if value is not None and value != []
    }


@app.command(
    "add",
    epilog=examples(
        "purveyor stream add ORDERS --subjects 'ORDERS.*' --max-age 7d",
        "purveyor stream add JOBS --subjects jobs.a,jobs.b --retention work",
        "purveyor stream add LAST --subjects 'state.>' --max-msgs-per-subject 1",
    ),
)
def add(
    ctx: typer.Context,
    name: StreamName,
    subjects: Subjects = None,
    retention: RetentionOption = None,
    discard: DiscardOption = None,
    discard_per_subject: PerSubject = None,
    max_msgs: MaxMsgs = None,
    max_bytes: MaxBytes = None,
    max_age: MaxAge = None,
    max_msg_size: MaxMsgSize = None,
    max_msgs_per_subject: MaxPerSubject = None,
    dupe_window: Window = None,
    storage: StorageOption = Storage.FILE,
    replicas: Replicas = None,
    no_ack: NoAck = None,
    description: Description = None,
    allow_direct: Direct = None,
    allow_atomic: Atomic = None,
    compression: CompressionOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Add a stream. Adding it again changes nothing; the same name with other settings is an error."""
    cli = Cli.of(ctx, as_json)
    given = _settings(
        subjects=subjects, retention=retention, discard=discard, discard_new_per_subject=discard_per_subject,
        max_msgs=max_msgs, max_bytes=max_bytes, max_age=max_age, max_msg_size=max_msg_size,
        max_msgs_per_subject=max_msgs_per_subject, duplicate_window=dupe_window, storage=storage,
        num_replicas=replicas if replicas is not None else cli.settings().replicas, no_ack=no_ack,
        description=description, allow_direct=allow_direct, allow_atomic=allow_atomic, compression=compression,
    )  # fmt: skip
    if not given.get("subjects"):
        given["subjects"] = (name,)
    config = StreamConfig(name=name, **given).validated()
    _show(cli, cli.call(lambda queues: queues.streams.add(config)), {})


@app.command(
    "edit",
    epilog=examples(
        "purveyor stream edit ORDERS --max-msgs 1000000",
        "purveyor stream edit ORDERS --retention interest --max-bytes none",
    ),
)
def edit(
    ctx: typer.Context,
    name: StreamName,
    subjects: Subjects = None,
    retention: RetentionOption = None,
    discard: DiscardOption = None,
    discard_per_subject: PerSubject = None,
    max_msgs: MaxMsgs = None,
    max_bytes: MaxBytes = None,
    max_age: MaxAge = None,
    max_msg_size: MaxMsgSize = None,
    max_msgs_per_subject: MaxPerSubject = None,
    dupe_window: Window = None,
    replicas: Replicas = None,
    description: Description = None,
    allow_direct: Direct = None,
    allow_atomic: Atomic = None,
    compression: CompressionOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Change settings in place. Settings that are not given stay."""
    changes = _settings(
        subjects=subjects, retention=retention, discard=discard, discard_new_per_subject=discard_per_subject,
        max_msgs=max_msgs, max_bytes=max_bytes, max_age=max_age, max_msg_size=max_msg_size,
        max_msgs_per_subject=max_msgs_per_subject, duplicate_window=dupe_window, num_replicas=replicas,
        description=description, allow_direct=allow_direct, allow_atomic=allow_atomic, compression=compression,
    )  # fmt: skip
    if not changes:
        raise InvalidInput("nothing to change", fix="give at least one setting, such as --max-age 7d")
    cli = Cli.of(ctx, as_json)
    _show(cli, cli.call(lambda queues: queues.streams.update(name, changes)), {})


@app.command("ls", epilog=examples("purveyor stream ls", "purveyor stream ls --subject ORDERS.new --json"))
def ls(
    ctx: typer.Context,
    subject: Annotated[str | None, typer.Option(metavar="SUBJECT", help="Only streams with this subject.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """List the streams."""
    cli = Cli.of(ctx, as_json)

    async def find(queues: Queues) -> list[StreamInfo]:
        names = set(await queues.streams.names(subject=subject)) if subject is not None else None
        return [info for info in await queues.streams.list() if names is None or info.config.name in names]

    found = cli.call(find)
    if cli.json:
        write_json([_as_json(info, {}) for info in found], indent=2)
        return
    rows = [
        (
            info.config.name,
            info.config.subjects,
            info.config.retention,
            info.state.messages,
            format_size(info.state.bytes, brief=True),
            info.state.last_seq,
            info.state.consumer_count,
        )
        for info in found
    ]
    write(
        format_table(
            ("NAME", "SUBJECTS", "RETENTION", "MESSAGES", "BYTES", "LASTSEQ", "CONSUMERS"), rows, wrap=("SUBJECTS",)
        )
    )


@app.command("info", epilog=examples("purveyor stream info ORDERS", "purveyor stream info ORDERS --json"))
def info_(ctx: typer.Context, name: StreamName, as_json: JsonFlag = False) -> None:
    """Show settings, state, and the disk space of a message."""
    cli = Cli.of(ctx, as_json)

    async def read(queues: Queues) -> tuple[StreamInfo, dict[str, int]]:
        info = await queues.streams.info(name)
        is_countable = 0 < info.state.num_subjects <= _MAX_COUNTED_SUBJECTS
        return info, await queues.streams.subjects(name) if is_countable else {}

    _show(cli, *cli.call(read))


@app.command(
    "get",
    epilog=examples(
        "purveyor stream get ORDERS 7",
        "purveyor stream get ORDERS --last-for ORDERS.new",
        "purveyor stream get ORDERS 7 --raw > order.bin",
    ),
)
def get(
    ctx: typer.Context,
    name: StreamName,
    sequence: Annotated[int | None, typer.Argument(metavar="SEQ", help="The sequence of the message.")] = None,
    last_for: Annotated[str | None, typer.Option(metavar="SUBJECT", help="The newest message of a subject.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Write only the bytes of the payload.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show a stored message: headers and payload."""
    cli = Cli.of(ctx, as_json)

    async def find(queues: Queues) -> StoredMessage:
        if last_for is not None and sequence is None:
            return await queues.streams.get_last(name, last_for)
        if sequence is None or last_for is not None:
            raise InvalidInput("give a sequence, or --last-for with a subject", fix="see purveyor stream get --help")
        if sequence < 1:
            raise InvalidInput(f"no message has the sequence {sequence}", fix="sequences begin at 1")
        return await queues.streams.get(name, sequence)

    message = cli.call(find)
    if raw:
        write_bytes(message.data)
    elif cli.json:
        write_json(_message_json(message), indent=2)
    else:
        when = f", {format_time(message.timestamp)}" if message.timestamp else ""
        write(f"Message {message.sequence} of stream {name}, on {escape(message.subject)}{when}")
        for header, values in message.headers.items():
            for value in values:
                write(f"{escape(header)}: {escape(value)}")
        write(f"\n{format_payload(message.data)}")


def _message_json(message: StoredMessage) -> dict[str, object]:
    return {
        "stream": message.stream,
        "sequence": message.sequence,
        "timestamp": message.timestamp,
        "subject": message.subject,
        "headers": message.headers,
        **payload_fields(message.data),
    }


@app.command(
    "purge",
    epilog=examples(
        "purveyor stream purge ORDERS --yes",
        "purveyor stream purge ORDERS --subject ORDERS.new --keep 10 --yes",
        "purveyor stream purge ORDERS --before 1000 --yes",
    ),
)
def purge(
    ctx: typer.Context,
    name: StreamName,
    subject: Annotated[str | None, typer.Option(metavar="SUBJECT", help="Only messages of this subject.")] = None,
    before: Annotated[int | None, typer.Option(metavar="SEQ", help="Only messages below this sequence.")] = None,
    keep: Annotated[int | None, typer.Option(metavar="N", help="Keep the newest N.")] = None,
    yes: YesFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Remove messages: all, those of a subject, those below a sequence, or all but the newest."""
    confirm(f"Remove messages from stream {name}?", yes=yes)
    cli = Cli.of(ctx, as_json)
    with progress(f"purging {name}"):
        count = cli.call(lambda queues: queues.streams.purge(name, subject=subject, before_sequence=before, keep=keep))
    write_json({"stream": name, "purged": count}) if cli.json else write(f"Removed {count} messages from {name}")


@app.command("seal", epilog=examples("purveyor stream seal ORDERS --yes"))
def seal(ctx: typer.Context, name: StreamName, yes: YesFlag = False, as_json: JsonFlag = False) -> None:
    """Seal a stream for ever: the server stores and deletes no more messages; consumers can still read."""
    confirm(f"Seal stream {name}? This cannot be undone.", yes=yes)
    cli = Cli.of(ctx, as_json)
    info = cli.call(lambda queues: queues.streams.seal(name))
    write_json(_as_json(info, {}), indent=2) if cli.json else write(f"Sealed {name}")


@app.command("rm", epilog=examples("purveyor stream rm ORDERS --yes"))
def rm(ctx: typer.Context, name: StreamName, yes: YesFlag = False, as_json: JsonFlag = False) -> None:
    """Remove a stream with all its messages."""
    confirm(f"Remove stream {name} with all its messages?", yes=yes)
    cli = Cli.of(ctx, as_json)
    with progress(f"removing {name}"):
        cli.call(lambda queues: queues.streams.remove(name))
    write_json({"stream": name, "removed": True}) if cli.json else write(f"Removed {name}")


def _show(cli: Cli, info: StreamInfo, subjects: dict[str, int]) -> None:
    if cli.json:
        write_json(_as_json(info, subjects), indent=2)
    else:
        write(stream_text(info, subjects))


def _as_json(info: StreamInfo, subjects: dict[str, int]) -> object:
    shown = to_jsonable(info)
    assert isinstance(shown, dict)
    found = compute_cost(info, subjects)
    return shown | ({"storage": cost_json(found)} if found else {})
