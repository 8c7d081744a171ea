"""Checks of a deployment: the NATS server (connection, rights, limits, clock, queues) and the files of the pipeline."""

import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from purveyor.app.doctor.conditions import judge
from purveyor.app.doctor.machine_checks import Finding, Weight, note, ok, warning, wrong
from purveyor.app.doctor.observation import observe, suspended_process
from purveyor.app.running_parts import NATS, running_parts
from purveyor.app.settings import Settings
from purveyor.jetstream.address import Address
from purveyor.jetstream.api import account, clock_offset_seconds
from purveyor.jetstream.publisher import Expect
from purveyor.jetstream.server.config import SYNC_ALWAYS
from purveyor.jetstream.streams import StreamUsage
from purveyor.model.errors import (
    DataLost,
    NotFound,
    PermissionDenied,
    PublishRefused,
    PurveyorError,
    ServerMissing,
    SetupError,
    UnknownConsumer,
    UnknownStream,
    UnreadableRecord,
)
from purveyor.model.event import SUBJECT
from purveyor.model.extras import install_line
from purveyor.model.file_lock import process_exists
from purveyor.queues.catalogue import LDIF, incoming, internal_queues
from purveyor.queues.client import Queues, connect
from purveyor.queues.dead_letters.store import DeadLetterStore
from purveyor.queues.migration.plan import Change
from purveyor.queues.migration.record import CONTINUES
from purveyor.queues.permissions import API, PIPELINE, PUSH, SOURCES
from purveyor.queues.registry import Snapshot, read_snapshot

if TYPE_CHECKING:
    from purveyor.pipeline.checkpoints import FoundCheckpoint
    from purveyor.spark.offsets import StreamView

_WARN_USAGE_SHARE: Final = 0.8
_MIN_PAYLOAD_BYTES: Final = 1 << 20
_CLOCK_WARN_SECONDS: Final = 1.0
_CLOCK_WRONG_SECONDS: Final = 5.0
_MISSING_STREAM: Final = "purveyor-doctor-stores-nothing"
"""A stream that does not exist: the server refuses a message that requires it, also if publishing is allowed."""


async def check_server(
    settings: Settings, find_address: Callable[[str | None], Address], *, patience_seconds: float = 5.0
) -> AsyncIterator[Finding]:
    """Check the NATS server. `find_address` returns the address for a component; None is the user without limits."""
    try:
        address = find_address(None)
        began = time.monotonic()
        async with connect(address, name="purveyor-doctor", patience_seconds=patience_seconds) as queues:
            took = (time.monotonic() - began) * 1000
            yield ok("nats", f"{address} answers in {took:.0f} ms, version {queues.connection.server_version}")
            async for finding in _check_connected(queues, settings):
                yield finding
        if settings.nats_url is None:
            async for finding in _check_component_users(find_address, patience_seconds):
                yield finding
    except ServerMissing as error:
        # Before the first start no server is expected.
        report = warning if settings.nats_dir.exists() else note
        yield report("nats", error.message, "`purveyor up` starts one; or set PURVEYOR_NATS_URL")
    except PurveyorError as error:
        suspended = _suspended_server(settings)
        fix = error.fix or "is the server running?"
        if suspended is not None:
            fix = f"process {suspended} is suspended; continue it: `kill -CONT {suspended}`"
        yield wrong("nats", error.message, fix)


def _suspended_server(settings: Settings) -> int | None:
    """Return the process of the embedded server on this machine if a signal suspended it."""
    if settings.nats_url is not None:
        return None
    found = (suspended_process(part.pid) for part in running_parts(settings.data_dir, NATS))
    return next((pid for pid in found if pid is not None), None)


async def _check_connected(queues: Queues, settings: Settings) -> AsyncIterator[Finding]:
    yield check_sync(settings)
    if queues.connection.max_payload < _MIN_PAYLOAD_BYTES:
        yield warning(
            "nats",
            f"the server accepts messages up to {queues.connection.max_payload} bytes, and refuses larger objects",
            "raise max_payload in the server's configuration, for example to 16 MB",
        )
    async for finding in _check_limits(queues):
        yield finding
    async for finding in _check_rights(queues):
        yield finding
    try:
        usages = await queues.streams.usage()
    except PermissionDenied as error:
        yield note("nats", f"queues cannot be listed: {error.message}", "use the credentials of an administrator")
        return
    yield await _check_clock(queues, usages)
    async for finding in _check_queues(queues, settings):
        yield finding
    async for finding in check_dead_letters(queues):
        yield finding
    async for finding in check_progress(queues, usages, settings):
        yield finding


def check_sync(settings: Settings) -> Finding:
    """Check how often writes reach the disk; an external server does not say so."""
    if settings.nats_url is not None:
        return note(
            "sync",
            "the server does not say how often it syncs to its disk",
            "with one replica set `jetstream { sync_interval: always }`, or a power cut loses acknowledged messages",
        )
    if settings.sync == SYNC_ALWAYS:
        return ok("sync", "the server writes every message to disk before it acknowledges it")
    return warning(
        "sync",
        f"the server writes messages to disk up to {settings.sync} after it acknowledges them: a power cut loses them",
        "set PURVEYOR_SYNC=always, unless you accept that",
    )


async def _check_limits(queues: Queues) -> AsyncIterator[Finding]:
    try:
        found = await account(queues)
    except PermissionDenied:
        return
    except SetupError as error:
        yield wrong("jetstream", error.message, error.fix or "enable JetStream")
        return
    used = (
        ("bytes", found.storage, found.max_storage),
        ("streams", found.streams, found.max_streams),
        ("consumers", found.consumers, found.max_consumers),
    )
    near = [(what, now, most) for what, now, most in used if most is not None and now >= most * _WARN_USAGE_SHARE]
    for what, now, most in near:
        text = f"{now} of at most {most} {what} are in use"
        yield (wrong if now >= (most or 0) else warning)("jetstream", text, "raise the limit of the account")
    if not near:
        yield ok("jetstream", f"{found.streams} streams, {found.consumers} consumers, {found.storage} bytes in use")


async def _check_rights(queues: Queues) -> AsyncIterator[Finding]:
    """Check what these credentials may do, by requests that change nothing."""
    denied: list[str] = []
    probes = (
        ("find streams", lambda: queues.streams.names(subject=SUBJECT)),
        ("read queues", lambda: queues.streams.raw_info(incoming().stream)),
        (
            "publish events",
            lambda: queues.publish(SUBJECT, b"", msg_id="doctor", expect=Expect(stream=_MISSING_STREAM)),
        ),
    )
    for what, probe in probes:
        try:
            await probe()
        except PermissionDenied:
            denied.append(what)
        except (PublishRefused, UnknownStream):
            continue  # allowed; the server refuses it for the expected reason
    if denied:
        yield warning(
            "permissions",
            f"these credentials may not {', nor '.join(denied)}",
            "expected for a component with fewer rights; `purveyor queues permissions` prints what each one needs",
        )
    else:
        yield ok("permissions", "these credentials may find and read queues and publish to them")


async def _check_component_users(
    find_address: Callable[[str | None], Address], patience_seconds: float
) -> AsyncIterator[Finding]:
    """Check the users that the embedded server has for each component."""
    for component in (API, PIPELINE, PUSH, SOURCES):
        try:
            address = find_address(component)
            async with connect(address, name="purveyor-doctor", patience_seconds=patience_seconds) as queues:
                await queues.streams.names(subject=SUBJECT)
        except (SetupError, PermissionDenied) as error:
            fix = error.fix or "restart the server: it creates the user"
            yield wrong("permissions", f"the NATS user of {component}: {error.message}", fix)
        else:
            yield ok("permissions", f"the NATS user of {component} is accepted")


async def _check_clock(queues: Queues, usages: Sequence[StreamUsage]) -> Finding:
    if not usages:
        return note("clock", "there is no stream yet: the time of the server is unknown")
    try:
        offset = await clock_offset_seconds(queues, usages[0].stream)
    except (PermissionDenied, UnknownStream):
        offset = None
    if offset is None:
        return note("clock", "the time of the server is unknown")
    text = f"the server's clock is {abs(offset):.3f} s {'ahead of' if offset > 0 else 'behind'} ours"
    fix = "let both machines follow a time server (chrony, systemd-timesyncd): leases and ages depend on clocks"
    if abs(offset) > _CLOCK_WRONG_SECONDS:
        return wrong("clock", text, fix)
    return warning("clock", text, fix) if abs(offset) > _CLOCK_WARN_SECONDS else ok("clock", text)


async def _check_queues(queues: Queues, settings: Settings) -> AsyncIterator[Finding]:
    missing, differing, fine = [], [], 0
    for queue in internal_queues((settings.dispatcher_group,)):
        try:
            plan = await queues.migrations.plan(queue, replicas=settings.replicas)
        except PermissionDenied:
            continue
        if plan.change is Change.CREATE:
            missing.append(queue.name)
        elif plan.change is Change.NOTHING:
            fine += 1
        else:
            differing.append(f"{queue.name} ({plan.change.value})")
    if missing:
        yield note("queues", f"missing: {', '.join(missing)}", "the first start of a part creates them")
    if differing:
        yield warning(
            "queues",
            f"different from their declaration: {', '.join(differing)}",
            "see `purveyor queues plan`, then `purveyor queues apply`",
        )
    if fine and not differing:
        yield ok("queues", f"{fine} queues are as declared")


async def check_dead_letters(queues: Queues) -> AsyncIterator[Finding]:
    """Count the open dead letters."""
    try:
        count = sum((await DeadLetterStore(queues).counts()).values())
    except PermissionDenied:
        return
    if count:
        text = f"{count} dead {'letter waits' if count == 1 else 'letters wait'} for a decision"
        yield note("dead letters", text, "`purveyor dlq list` shows them with their reasons")


async def check_progress(queues: Queues, usages: Sequence[StreamUsage], settings: Settings) -> AsyncIterator[Finding]:
    """Check whether the parts and the subscriptions make progress."""
    try:
        seen = await observe(queues, await read_snapshot(queues, Snapshot()), usages)
    except PermissionDenied as error:
        yield note("pipeline", f"progress cannot be read: {error.message}", "use the credentials of an administrator")
        return
    for condition in judge(seen, group=settings.dispatcher_group, archive_seconds=settings.archive_seconds):
        yield condition.finding()


AskApi = Callable[[str], dict[str, Any]]
"""Sends a request to the JetStream API of the server, such as `STREAM.INFO.<stream>`."""

_TRANSFORM: Final = "transform"
"""Its checkpoint has the directories, which are nowhere else: so one that is missing is a loss."""
_NO_CHECKPOINTS: Final = note("checkpoints", "none: the pipeline has not run on this data directory")


def check_pipeline(settings: Settings, ask_api: AskApi | None) -> Iterator[Finding]:
    """Check the files of the pipeline; without a server only those on this machine."""
    directory = settings.data_dir / "checkpoints"
    found = sorted(path.name for path in directory.iterdir() if path.is_dir()) if directory.is_dir() else []
    if not found and not (settings.data_dir / "archive").is_dir():
        yield _NO_CHECKPOINTS
    elif find_spec("pyspark") is None:
        yield note("checkpoints", f"{len(found)} not checked: pyspark is not installed", install_line("spark"))
    else:
        from purveyor.pipeline.checkpoints import REPLACED  # noqa: PLC0415 - it brings Spark

        names = [name for name in found if REPLACED not in name]
        for name in names:
            yield _check_checkpoint(directory / name, settings.data_dir / "archive", ask_api)
        if not names:
            yield _NO_CHECKPOINTS
        if _TRANSFORM not in names:
            lost = _check_checkpoint(directory / _TRANSFORM, settings.data_dir / "archive", ask_api)
            if lost.weight in (Weight.WARNING, Weight.WRONG):  # else the transform has not run here
                yield lost
    yield from _check_status(settings.data_dir, is_server_there=ask_api is not None)


def _check_checkpoint(path: Path, archive: Path, ask_api: AskApi | None) -> Finding:
    """Compare a checkpoint with its stream, by the rule that its part follows when it starts."""
    from purveyor.pipeline import checkpoints  # noqa: PLC0415 - it brings Spark
    from purveyor.pipeline.archive.layout import archived_until  # noqa: PLC0415

    found = checkpoints.FoundCheckpoint(path)
    try:
        found = checkpoints.read_checkpoint(path)
        where = "no batch yet" if found.offset is None else f"at {found.offset.sequence}"
        stream = LDIF.stream if path.name == _TRANSFORM else None if found.offset is None else found.offset.stream
        if stream is None or ask_api is None:
            if found.damage is None:
                return ok("checkpoints", f"{path.name}: {where}")
            return warning(
                "checkpoints", f"{path.name}: {found.damage}", "start the pipeline: it repairs the checkpoint, or stops"
            )
        rule: checkpoints.Rule
        rule, durable = checkpoints.dispatch_rule, path.name.removeprefix("dispatch-")
        if path.name == "archive":
            rule = checkpoints.archive_rule(archive, archived_until(archive))
        elif path.name == _TRANSFORM:
            rule, durable = checkpoints.transform_rule, "transformer"
        view = _view(stream, ask_api(f"STREAM.INFO.{stream}"))
        decision = rule(found, view, _floor(ask_api, f"CONSUMER.INFO.{stream}.{durable}"))
    except PurveyorError as error:
        return _not_compared(found, error)
    match decision:
        case checkpoints.StartOver(reason):
            return warning(
                "checkpoints", f"{path.name}: {reason}", "none needed: the part replaces the checkpoint when it starts"
            )
        case checkpoints.Continue(str() as text):
            return warning("checkpoints", f"{path.name}: {text}", "import each directory again")
        case _ if found.offset is None:
            return ok("checkpoints", f"{path.name}: {where}")
        case _:
            return ok("checkpoints", f"{path.name} is {where} of {view.last} in {stream}")


def _not_compared(found: "FoundCheckpoint", error: PurveyorError) -> Finding:
    """Return the finding for a checkpoint that its part could not use, or that cannot be compared."""
    name = found.path.name
    if isinstance(error, NotFound):
        if found.offset is None:
            return ok("checkpoints", f"{name}: no batch yet")
        text = f"{name} is at {found.offset.sequence} of {found.offset.stream}, which does not exist"
        return wrong("checkpoints", text, "restore the NATS store and the checkpoints of one moment")
    if isinstance(error, DataLost | UnreadableRecord):
        return wrong("checkpoints", f"{name}: {error.message}", error.fix or "see the guide to operations")
    return note("checkpoints", f"{name} cannot be compared: {error.message}", error.fix)


def _view(stream: str, info: dict[str, Any]) -> "StreamView":
    from purveyor.spark.offsets import StreamView  # noqa: PLC0415 - it brings Spark

    state, config = info["state"], info["config"]
    return StreamView(
        name=stream,
        created=str(info["created"]),
        first=int(state["first_seq"]),
        last=int(state["last_seq"]),
        messages=int(state["messages"]),
        continues=frozenset(str((config.get("metadata") or {}).get(CONTINUES, "")).split()),
    )


def _floor(ask_api: AskApi, request: str) -> int | None:
    try:
        return int(ask_api(request)["ack_floor"]["stream_seq"])
    except UnknownConsumer:
        return None


def _check_status(data_dir: Path, *, is_server_there: bool) -> Iterator[Finding]:
    """Check the last status of a pipeline on this machine. With a server, the status board there says more."""
    for path in sorted(data_dir.glob("pipeline-status*.json")):
        try:
            status = json.loads(path.read_text(encoding="utf-8"))
            pid, parts = int(status["pid"]), list(status["parts"])
        except (OSError, ValueError, KeyError, TypeError):
            yield warning("pipeline", f"{path.name} cannot be read", "the pipeline replaces it while it runs")
            continue
        if not process_exists(pid):
            fix = "start `purveyor serve pipeline`; under `purveyor up` it starts automatically"
            yield warning("pipeline", f"process {pid} has ended unexpectedly", fix)
            continue
        for part in () if is_server_there else parts:
            text = f"{part.get('part')} is {part.get('state')}"
            if part.get("error"):
                yield warning("pipeline", f"{text}: {part['error']}", f"see {data_dir / 'logs' / 'pipeline.log'}")
            else:
                yield ok("pipeline", text)
