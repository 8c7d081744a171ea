"""The NATS server: whether it answers, what it allows, how it is set, what time it has, and what is wrong in it."""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from typing import Final

from purveyor.app.doctor.findings import Finding, note, ok, warning, wrong
from purveyor.app.settings import Settings
from purveyor.jetstream.account import account, clock_offset_seconds
from purveyor.jetstream.address import Address
from purveyor.jetstream.publisher import Expect
from purveyor.jetstream.server.config import SYNC_ALWAYS
from purveyor.jetstream.streams import Fill
from purveyor.model.errors import (
    PermissionDenied,
    PublishRefused,
    PurveyorError,
    ServerMissing,
    SetupError,
    UnknownStream,
)
from purveyor.model.event import SUBJECT
from purveyor.queues.catalogue import incoming, internal_queues
from purveyor.queues.client import Queues, connect
from purveyor.queues.dead_letters.store import LetterBox
from purveyor.queues.migration.plan import Change
from purveyor.queues.permissions import API, INTAKE, PIPELINE

_NEARLY: Final = 0.8
_LITTLE_PAYLOAD: Final = 1 << 20
_CLOCK_WARN_SECONDS: Final = 1.0
_CLOCK_WRONG_SECONDS: Final = 5.0
_OLD_SECONDS: Final = 3600.0
_NOWHERE: Final = "purveyor-doctor-stores-nothing"
"""A stream that nobody has: a message that must go there is refused, whoever may publish it."""


async def look_at_server(
    settings: Settings, find_address: Callable[[str | None], Address], *, patience_seconds: float = 5.0
) -> AsyncIterator[Finding]:
    """Everything that the server can be asked. `find_address` gives the address of a component, None: of everybody."""
    try:
        address = find_address(None)
        began = time.monotonic()
        async with connect(address, name="purveyor-doctor", patience_seconds=patience_seconds) as queues:
            took = (time.monotonic() - began) * 1000
            yield ok("nats", f"{address} answers in {took:.0f} ms, version {queues.connection.server_version}")
            async for finding in _look(queues, settings):
                yield finding
        if settings.nats_url is None:
            async for finding in _components(find_address, patience_seconds):
                yield finding
    except ServerMissing as error:
        # Before the first start that is as it should be; afterwards somebody misses it.
        weigh = warning if settings.nats_dir.exists() else note
        yield weigh("nats", error.message, "`purveyor up` starts one; or set PURVEYOR_NATS_URL")
    except PurveyorError as error:
        yield wrong("nats", error.message, error.fix or "is the server running?")


async def _look(queues: Queues, settings: Settings) -> AsyncIterator[Finding]:
    yield sync(settings)
    if queues.connection.max_payload < _LITTLE_PAYLOAD:
        yield warning(
            "nats",
            f"messages may have {queues.connection.max_payload} bytes: larger objects are refused",
            "raise max_payload in the server's configuration, to 8 MB say",
        )
    async for finding in _limits(queues):
        yield finding
    async for finding in _rights(queues):
        yield finding
    try:
        fills = await queues.streams.fills()
    except PermissionDenied as error:
        yield note("nats", f"queues cannot be listed: {error.message}", "use the credentials of an administrator")
        return
    yield await _clock(queues, fills)
    async for finding in _queues(queues, settings):
        yield finding
    async for finding in letters(queues):
        yield finding
    for finding in _stuck(fills):
        yield finding


def sync(settings: Settings) -> Finding:
    """How often writes reach the disk. Of a server that is not ours that cannot be seen."""
    if settings.nats_url is not None:
        return note(
            "sync",
            "how often the server writes to its disk cannot be seen from here",
            "with one replica set `jetstream { sync_interval: always }`, or a power cut loses what was acknowledged",
        )
    if settings.sync == SYNC_ALWAYS:
        return ok("sync", "every message is on disk before it is acknowledged")
    return warning(
        "sync",
        f"messages are on disk up to {settings.sync} after they were acknowledged: a power cut loses them",
        "set PURVEYOR_SYNC=always, unless that may be",
    )


async def _limits(queues: Queues) -> AsyncIterator[Finding]:
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
    near = [(what, now, most) for what, now, most in used if most is not None and now >= most * _NEARLY]
    for what, now, most in near:
        text = f"{now} of at most {most} {what} are in use"
        yield (wrong if now >= (most or 0) else warning)("jetstream", text, "raise the limit of the account")
    if not near:
        yield ok("jetstream", f"{found.streams} streams, {found.consumers} consumers, {found.storage} bytes in use")


async def _rights(queues: Queues) -> AsyncIterator[Finding]:
    """What these credentials may do, found out by questions that change nothing."""
    denied: list[str] = []
    probes = (
        ("find streams", lambda: queues.streams.names(subject=SUBJECT)),
        ("look at queues", lambda: queues.streams.raw_info(incoming().stream)),
        ("publish events", lambda: queues.publish(SUBJECT, b"", msg_id="doctor", expect=Expect(stream=_NOWHERE))),
    )
    for what, ask in probes:
        try:
            await ask()
        except PermissionDenied:
            denied.append(what)
        except (PublishRefused, UnknownStream):
            continue  # allowed, and refused for another reason: that was the plan
    if denied:
        yield warning(
            "permissions",
            f"these credentials may not {', nor '.join(denied)}",
            "fine for a part with fewer rights; `purveyor queues permissions` prints what each part needs",
        )
    else:
        yield ok("permissions", "these credentials may find, look at and publish to queues")


async def _components(find_address: Callable[[str | None], Address], patience_seconds: float) -> AsyncIterator[Finding]:
    """The embedded server has a user for each part."""
    for component in (API, PIPELINE, INTAKE):
        try:
            address = find_address(component)
            async with connect(address, name="purveyor-doctor", patience_seconds=patience_seconds) as queues:
                await queues.streams.names(subject=SUBJECT)
        except (SetupError, PermissionDenied) as error:
            fix = error.fix or "stop the server and start it again: it is made"
            yield wrong("permissions", f"the NATS user of {component}: {error.message}", fix)
        else:
            yield ok("permissions", f"the NATS user of {component} is accepted")


async def _clock(queues: Queues, fills: Sequence[Fill]) -> Finding:
    if not fills:
        return note("clock", "there is no stream yet that would tell the server's time")
    try:
        offset = await clock_offset_seconds(queues, fills[0].stream)
    except (PermissionDenied, UnknownStream):
        offset = None
    if offset is None:
        return note("clock", "the server does not tell its time")
    text = f"the server's clock is {abs(offset):.3f} s {'ahead of' if offset > 0 else 'behind'} ours"
    fix = "let both machines follow a time server (chrony, systemd-timesyncd): leases and ages are told by clocks"
    if abs(offset) > _CLOCK_WRONG_SECONDS:
        return wrong("clock", text, fix)
    return warning("clock", text, fix) if abs(offset) > _CLOCK_WARN_SECONDS else ok("clock", text)


async def _queues(queues: Queues, settings: Settings) -> AsyncIterator[Finding]:
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
        yield note("queues", f"not made yet: {', '.join(missing)}", "they are made by the first start of a part")
    if differing:
        yield warning(
            "queues",
            f"other than declared: {', '.join(differing)}",
            "see `purveyor queues plan`, then `purveyor queues apply`",
        )
    if fine and not differing:
        yield ok("queues", f"{fine} queues are as declared")


async def letters(queues: Queues) -> AsyncIterator[Finding]:
    """Count the dead letters. The queue also holds receipts of settled ones: those need no one."""
    try:
        count = sum((await LetterBox(queues).counts()).values())
    except PermissionDenied:
        return
    if count:
        text = f"{count} dead letters wait for somebody"
        yield note("dead letters", text, "`purveyor dlq list` shows them with their reasons")


def _stuck(fills: Sequence[Fill]) -> list[Finding]:
    """What waits for people."""
    found = []
    for fill in fills:
        age = 0.0 if fill.oldest is None else (datetime.now(UTC) - fill.oldest).total_seconds()
        if fill.stream == incoming().stream and age > _OLD_SECONDS:
            text = f"the oldest event in incoming has been there for {age / 3600:.1f} hours"
            fix = "is `purveyor serve pipeline` running, dispatch and archive? See logs/ of its data directory"
            found.append(warning("queues", text, fix))
    return found


__all__ = ["letters", "look_at_server", "sync"]
