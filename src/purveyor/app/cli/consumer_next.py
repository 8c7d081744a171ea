"""`purveyor consumer next`: pull messages by hand and answer them with any word a consumer can say."""

from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Annotated, assert_never

import typer

from purveyor.app.cli.context import Cli, ConsumerName, JsonFlag, StreamName, examples
from purveyor.app.cli.message_text import write_object, write_received
from purveyor.app.cli.parsers import parse_duration
from purveyor.app.cli.render import show_duration, write
from purveyor.jetstream.config import AckPolicy
from purveyor.jetstream.messages import Message
from purveyor.model.errors import InvalidInput, UnknownMessage
from purveyor.queues.client import Queues


class Word(Enum):
    """What to say about a message."""

    ACK = "ack"
    NAK = "nak"
    PROGRESS = "progress"
    NEXT = "next"
    TERM = "term"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which messages to pull."""

    stream: str
    consumer: str
    count: int
    wait: timedelta


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer with its details."""

    word: Word
    delay: timedelta | None = None
    reason: str = ""
    confirm: bool = False

    def __post_init__(self) -> None:
        if self.delay is not None and self.word is not Word.NAK:
            raise InvalidInput("--delay is for --answer nak", fix="add it, or drop the delay")
        if self.reason and self.word is not Word.TERM:
            raise InvalidInput("--reason is for --answer term", fix="add it, or drop the reason")
        if self.confirm and self.word in (Word.NEXT, Word.NONE):
            raise InvalidInput(f"an answer of {self.word.value!r} cannot be confirmed", fix="drop --confirm")

    def told(self) -> str:
        """What was said, for people."""
        sure = ", confirmed by the server" if self.confirm else ""
        match self.word:
            case Word.ACK | Word.NEXT:
                return f"Acknowledged message{sure}"
            case Word.NAK:
                when = f", to come again after {show_duration(self.delay)}" if self.delay else ", to come again"
                return f"Refused message for now{when}{sure}"
            case Word.PROGRESS:
                return f"Asked for more time{sure}"
            case Word.TERM:
                return f"Terminated message{f': {self.reason}' if self.reason else ''}{sure}"
            case Word.NONE:
                return ""
            case never:
                assert_never(never)


async def say(reply: Reply, message: Message) -> None:
    """Answer a message. NEXT is more than an answer; see `_take`."""
    match reply.word:
        case Word.ACK:
            await message.ack(confirm=reply.confirm)
        case Word.NAK:
            await message.nak(delay=reply.delay, confirm=reply.confirm)
        case Word.PROGRESS:
            await message.in_progress(confirm=reply.confirm)
        case Word.TERM:
            await message.term(reply.reason, confirm=reply.confirm)
        case Word.NONE | Word.NEXT:
            pass
        case never:
            assert_never(never)


def register(app: typer.Typer) -> None:
    """Add the command to `purveyor consumer`."""
    app.command(
        "next",
        epilog=examples(
            "purveyor consumer next ORDERS DISPATCH",
            "purveyor consumer next ORDERS DISPATCH --count 10 --wait 1s",
            "purveyor consumer next ORDERS DISPATCH --answer nak --delay 5s",
            "purveyor consumer next ORDERS DISPATCH --answer term --reason 'no such customer'",
            "purveyor consumer next ORDERS DISPATCH --confirm",
        ),
    )(next_)


def next_(
    ctx: typer.Context,
    stream: StreamName,
    name: ConsumerName,
    count: Annotated[int, typer.Option(metavar="N", min=1, help="How many messages.")] = 1,
    wait: Annotated[str, typer.Option(metavar="DURATION", help="How long to wait for them.")] = "5s",
    ack: Annotated[bool, typer.Option("--ack/--no-ack", help="Acknowledge, or leave it unanswered.")] = True,
    answer: Annotated[Word | None, typer.Option(help="What to answer; default: ack.")] = None,
    delay: Annotated[str | None, typer.Option(metavar="DURATION", help="With nak: come again after.")] = None,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="With term: why.")] = "",
    confirm: Annotated[bool, typer.Option("--confirm", help="Wait until the server has taken the answer.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Pull the next messages of a consumer and answer them."""
    cli = Cli.of(ctx, as_json)
    word = answer or (Word.ACK if ack else Word.NONE)
    reply = Reply(word, parse_duration(delay) if delay is not None else None, reason, confirm)
    wanted = Wanted(stream, name, count, parse_duration(wait))
    cli.call(lambda queues: _take(queues, cli, wanted, reply))


async def _take(queues: Queues, cli: Cli, wanted: Wanted, reply: Reply) -> None:
    who = f"consumer {wanted.consumer!r} of stream {wanted.stream!r}"
    config = (await queues.consumers.info(wanted.stream, wanted.consumer)).config
    if config.deliver_subject:
        raise InvalidInput(
            f"{who} pushes to {config.deliver_subject!r}", fix=f"watch it with: purveyor sub {config.deliver_subject}"
        )
    if config.ack_policy is AckPolicy.NONE:
        if reply.confirm or reply.word not in (Word.ACK, Word.NONE):
            raise InvalidInput(f"{who} takes no answers", fix="its ack policy is none")
        reply = Reply(Word.NONE)
    seconds = wanted.wait.total_seconds()
    got = await queues.fetch(wanted.stream, wanted.consumer, wanted.count, wait_seconds=seconds)
    if not got:
        raise UnknownMessage(
            f"no message for {who} within {show_duration(wanted.wait)}", fix="publish one, or wait longer with --wait"
        )
    for message in got:
        await _answer(cli, message, reply)
        if reply.word is Word.NEXT:
            following = await message.ack_next(wait_seconds=seconds)
            if following is not None:
                await _answer(cli, following, Reply(Word.NONE))


async def _answer(cli: Cli, message: Message, reply: Reply) -> None:
    if not cli.json:
        write_received(message)
    await say(reply, message)
    if cli.json:
        write_object(message, answer=reply.word, confirmed=reply.confirm)
    elif reply.told():
        write(f"\n{reply.told()}")
