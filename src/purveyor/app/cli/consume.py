"""`purveyor next` and `purveyor ack`: get messages of a subscription and acknowledge them by hand.

The commands lease messages as a separate instance, `cli-<user>@<host>`. So the same user on the same machine gets
the same oldest message again until it is acknowledged, and takes no message that a running consumer has leased.
"""

import asyncio
import getpass
import json
import os
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar

import typer

from purveyor.app.cli.backends.api_access import call_backend
from purveyor.app.cli.backends.message_backend import (
    Consuming,
    DirectMessages,
    RemoteMessages,
    SubscriptionMessages,
)
from purveyor.app.cli.context import Cli, JsonFlag, examples
from purveyor.app.cli.output import escape, progress, write, write_json, write_note
from purveyor.app.cli.parsers import parse_duration
from purveyor.app.cli.render import format_time, read_time
from purveyor.delivery.pull import MAX_LEASE_MESSAGES
from purveyor.model.errors import InvalidInput, PurveyorError, Unavailable, UnknownMessage
from purveyor.model.json_fields import Json

next_app = typer.Typer(rich_markup_mode=None, add_completion=False)
ack_app = typer.Typer(rich_markup_mode=None, add_completion=False)
T = TypeVar("T")

_DEFAULT_WAIT = "5s"
_LONGEST_POLL_SECONDS = 30.0
_RETRY_SECONDS = 1.0
_MAX_INSTANCE_CHARACTERS = 200
_MOST_NAMED_INSTANCES = 3
INSTANCE_HEADER = "X-Consumer-Instance"
_DELIVERY_FIELDS = (
    "sequence_number",
    "num_delivered",
    "position",
    "lease_id",
    "lease_until",
    "traceparent",
    "tracestate",
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The subscription.")]
Instance = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="The consumer instance that leases; default: cli-<user>@<host>."),
]


def _call(cli: Cli, consuming: Consuming, work: Callable[[SubscriptionMessages], Awaitable[T]]) -> T:
    """Run work on the messages of a subscription."""
    return call_backend(
        cli,
        lambda queues, settings: DirectMessages.open(queues, settings, consuming),
        lambda routes: RemoteMessages(routes, consuming),
        work,
        headers={INSTANCE_HEADER: consuming.instance},
    )


def own_instance() -> str:
    """Return the instance of this user on this machine, in printable ASCII: it may become a header of HTTP."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container may run as a user id without a name
        user = str(os.getuid())
    wanted = f"cli-{user}@{socket.gethostname()}"
    return "".join(ch if ch.isascii() and ch.isprintable() else "?" for ch in wanted)[:_MAX_INSTANCE_CHARACTERS]


@next_app.command(
    "next",
    epilog=examples(
        "purveyor next ox",
        "purveyor next ox --count 10 --json",
        "purveyor next ox --ack",
        "purveyor next ox --follow --ack --json | handle-events",
    ),
)
def next_(
    ctx: typer.Context,
    name: Name,
    count: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Number of messages; default: 1, with --follow no end.")
    ] = None,
    wait: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help=f"How long to wait for a message; default: {_DEFAULT_WAIT}, with --follow no end.",
            show_default=False,
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more messages until Ctrl-C.")] = False,
    ack: Annotated[bool, typer.Option("--ack", help="Acknowledge each message after it is printed.")] = False,
    instance: Instance = None,
    as_json: JsonFlag = False,
) -> None:
    """Get the next messages of a subscription: the oldest that are not acknowledged.

    The same user gets the same messages again until they are acknowledged, with --ack or `purveyor ack`. In parallel
    delivery a second call gets others, until the lease of the first ones ends. Each call counts as a delivery.

    With --json each message is one line, in the form of the HTTP API. A message is acknowledged when it is written to
    standard output, not when the program that reads it is done.

    Exit codes: 0 there was a message; 1 there was none, or an error.
    """
    cli = Cli.of(ctx, as_json)
    if follow and not ack:
        raise InvalidInput("--follow without --ack would show the same oldest message again and again", fix="add --ack")
    if not ack and count is not None and count > MAX_LEASE_MESSAGES:
        raise InvalidInput(
            f"{count} messages cannot be leased at a time", fix=f"give at most {MAX_LEASE_MESSAGES}, or add --ack"
        )
    wait = wait or (None if follow else _DEFAULT_WAIT)
    wait_seconds = None if wait is None else parse_duration(wait).total_seconds()
    consuming = Consuming(name, instance or own_instance())

    async def work(messages: SubscriptionMessages) -> None:
        if ack:
            limits = Limits(count if count is not None or follow else 1, wait_seconds, follow)
            number = await _print_and_acknowledge(cli, consuming, messages, limits)
        else:
            with progress(f"waiting for a message of {name}"):
                found = await _lease(messages, count or 1, wait_seconds)
            number = _print(cli, consuming, found)
        if not number and not follow:
            raise await _no_message(name, messages, f"no message for subscription {name!r} within {wait}")

    _call(cli, consuming, work)


async def _no_message(name: str, messages: SubscriptionMessages, what: str) -> UnknownMessage:
    """Return the error for an empty answer, with its cause if the status shows one."""
    try:
        found = explain_no_message(name, await messages.status())
    except PurveyorError:  # the answer is still that there is none
        found = explain_no_message(name, {})
    return UnknownMessage(what if found.reason is None else f"{what}: {found.reason}", fix=found.fix)


@dataclass(frozen=True, slots=True)
class Limits:
    """When to stop: after a number of messages, or when no message comes for some time. None: no limit."""

    count: int | None
    wait_seconds: float | None
    follow: bool


async def _print_and_acknowledge(cli: Cli, consuming: Consuming, messages: SubscriptionMessages, limits: Limits) -> int:
    """Print messages and acknowledge each; return how many. A crash between the two delivers the message again."""
    number = 0
    wait_seconds = limits.wait_seconds
    if limits.follow:
        write_note(f"Waiting for messages of {consuming.name}; Ctrl-C ends it")
    while limits.count is None or number < limits.count:
        with progress(f"waiting for a message of {consuming.name}", visible=not limits.follow):
            found = await _lease(messages, 1, wait_seconds, retry=limits.follow)
        if not found:
            break
        for message in found:
            number += _print(cli, consuming, [message], acknowledges=True)
            await _acknowledge(messages, message["sequence_number"], retry=limits.follow)
        if not limits.follow:
            wait_seconds = 0.0  # only the first message is waited for
    return number


async def _lease(
    messages: SubscriptionMessages, count: int, wait_seconds: float | None, *, retry: bool = False
) -> list[Json]:
    """Lease messages; wait in parts that every back end allows. With `retry`, wait also for a server that is away."""
    deadline = None if wait_seconds is None else time.monotonic() + wait_seconds
    while True:
        left = _LONGEST_POLL_SECONDS if deadline is None else max(deadline - time.monotonic(), 0.0)
        try:
            found = await messages.lease(count, min(left, _LONGEST_POLL_SECONDS))
        except Unavailable as error:
            if not retry:
                raise
            await _note_and_pause(error)
            continue
        if found or left <= 0:
            return found


async def _acknowledge(messages: SubscriptionMessages, sequence: int, *, retry: bool) -> None:
    """Acknowledge a message. With `retry`, repeat it until the server answers."""
    is_repeated = False
    while True:
        try:
            await messages.acknowledge(sequence)
        except Unavailable as error:
            if not retry:
                raise
            is_repeated = True
            await _note_and_pause(error)
        except UnknownMessage:
            if not is_repeated:
                raise
            return  # the server stored the first one, and its answer was lost
        else:
            return


async def _note_and_pause(error: Unavailable) -> None:
    write_note(f"{error.message}; the command tries again")
    await asyncio.sleep(_RETRY_SECONDS)


def _print(cli: Cli, consuming: Consuming, messages: list[Json], *, acknowledges: bool = False) -> int:
    for message in messages:
        # Not `write_json`, which omits null: the message is printed as it is.
        write(json.dumps(message, ensure_ascii=False) if cli.json else _message_text(consuming.name, message))
    if messages and not acknowledges and not cli.json:
        sequences = " ".join(str(message["sequence_number"]) for message in messages)
        write(f"\nNot acknowledged. To acknowledge: purveyor ack {consuming.name} {sequences}")
    return len(messages)


def _message_text(name: str, message: Json) -> str:
    event = {field: value for field, value in message.items() if field not in _DELIVERY_FIELDS}
    head = f"--- message {message['sequence_number']} of {name}"
    if message.get("position") is not None:
        head += f", position {message['position']}"
    if message.get("num_delivered", 1) > 1:
        head += f", delivery {message['num_delivered']}"
    return "\n".join(map(escape, (head, *json.dumps(event, ensure_ascii=False, indent=2).splitlines())))


@ack_app.command(
    "ack",
    epilog=examples("purveyor ack ox 17", "purveyor ack ox 17 18 19", "purveyor ack ox 19 --up-to"),
)
def ack_(
    ctx: typer.Context,
    name: Name,
    sequences: Annotated[
        list[int], typer.Argument(metavar="SEQUENCE...", min=1, help="The sequence numbers that `next` printed.")
    ],
    up_to: Annotated[
        bool, typer.Option("--up-to", help="Acknowledge also all earlier messages that this instance has leased.")
    ] = False,
    instance: Instance = None,
    as_json: JsonFlag = False,
) -> None:
    """Acknowledge messages of a subscription: they are never delivered again, whichever instance has leased them."""
    cli = Cli.of(ctx, as_json)
    if up_to and len(sequences) > 1:
        raise InvalidInput("--up-to needs one sequence", fix="give the last one")
    consuming = Consuming(name, instance or own_instance())

    async def work(messages: SubscriptionMessages) -> int:
        if up_to:
            return await messages.acknowledge_up_to(sequences[0])
        for sequence in dict.fromkeys(sequences):
            await messages.acknowledge(sequence)
        return len({*sequences})

    acknowledged = _call(cli, consuming, work)
    if cli.json:
        write_json({"name": name, "sequences": sequences, "acknowledged": acknowledged})
    else:
        write(f"Acknowledged {acknowledged} message{'' if acknowledged == 1 else 's'} of {name}")


@dataclass(frozen=True, slots=True)
class NoMessage:
    """The reason, if one is known, and what to do."""

    reason: str | None
    fix: str


def explain_no_message(name: str, status: Json) -> NoMessage:
    """Return why a subscription with this status (`GET .../status`) had no message to lease. Pure.

    A new user sees an empty answer first: the pipeline does not run, the subscription is paused, or another consumer
    has leased the messages. The first cause in this order is named: the later ones cannot end before it does.
    """
    show = f"`purveyor subscription show {name}`"
    wait = f"see {show}, or wait longer with --wait"
    suspended, prefill, leases = status.get("suspended"), status.get("prefill"), status.get("leases")
    if status.get("paused"):
        cause = f" ({status['pause_reason']})" if status.get("pause_reason") else ""
        return NoMessage(f"it is paused{cause}", f"`purveyor subscription resume {name}` continues the delivery")
    if prefill and prefill["status"] in ("pending", "running"):
        return NoMessage(f"its prefill is {prefill['status']}, and comes before its events", wait)
    if leases:
        return NoMessage(_describe_leases(leases), f"wait until then, or see {show}")
    if status.get("next_attempt"):
        return NoMessage(f"its next message is delivered again at {_format_moment(status['next_attempt'])}", wait)
    if suspended:
        return NoMessage(
            f"dispatch is suspended at position {suspended['position']}: {suspended['reason']}",
            f"remove the cause, then `purveyor subscription resume {name}`",
        )
    if status.get("lag"):
        return NoMessage(
            "the pipeline has not dispatched all events yet", f"see that the pipeline runs (`purveyor up`), or {show}"
        )
    return NoMessage(None, wait)


def _describe_leases(leases: list[Json]) -> str:
    count = sum(each["messages"] for each in leases)
    more = "" if len(leases) <= _MOST_NAMED_INSTANCES else f" and {len(leases) - _MOST_NAMED_INSTANCES} others"
    names = ", ".join(repr(each["instance"]) for each in leases[:_MOST_NAMED_INSTANCES])
    what = "1 message is" if count == 1 else f"{count} messages are"
    return f"{what} leased by {names}{more} until {_format_moment(max(each['until'] for each in leases))}"


def _format_moment(text: str) -> str:
    moment = read_time(text)
    return text if moment is None else format_time(moment)
