"""The queue `dead-letters` for those who deal with what is in it: read letters, settle them, take them out.

A letter is known by its sequence in the stream. One that is put back or discarded leaves a receipt, on
`dead-letters.settled.<origin>.<sequence>`: what became of it, without its body. It is written before the letter goes,
so that a position is never unaccounted for, and whoever is cut off in between finds where to go on.
"""

import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import TYPE_CHECKING, Final

from purveyor.jetstream.direct_get import Wanted, read_page
from purveyor.jetstream.headers import LETTER, Headers, first
from purveyor.jetstream.publisher import Expect
from purveyor.jetstream.streams import StoredMessage
from purveyor.model.errors import InvalidInput, Refused, UnknownMessage, UnknownStream, UnreadableRecord
from purveyor.model.stored_record import UPGRADE
from purveyor.queues.catalogue import DEAD_LETTERS
from purveyor.queues.dead_letters.letter import DeadLetter, token

if TYPE_CHECKING:
    from purveyor.queues.client import Queues

LETTERS: Final = "dead-letters.*"
"""The subjects of letters; receipts have longer ones."""
SETTLED: Final = "dead-letters.settled"
FATE: Final = "Purveyor-Fate"
PUT_AT: Final = "Purveyor-Put-At"
_SETTLED_AT: Final = "Purveyor-Settled-At"
_CARRIED: Final = re.compile(r"Purveyor-(?!Original-|Details$).*|Purveyor-Original-(Purveyor-.*|Nats-Msg-Id)")
_PAGE: Final = 200
_END: Final = 2**63


class Fate(Enum):
    """What became of a letter."""

    RETRIED = "retried"
    DISCARDED = "discarded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked:
    """A message of the queue. `letter` is None when it is none: `problem` says why, and it can only be discarded.

    One that this program does not understand is `unreadable`: it stays until a newer program deals with it.
    """

    id: int
    subject: str
    at: datetime | None
    headers: Headers
    data: bytes
    letter: DeadLetter | None = None
    problem: str | None = None
    unreadable: bool = False

    @classmethod
    def of(cls, message: StoredMessage) -> "Parked":
        """A message as it lies in the queue, whoever wrote it."""
        letter, problem, unreadable = None, None, False
        try:
            letter = DeadLetter.from_message(message.headers, message.data)
        except InvalidInput as error:
            problem = error.message
        except UnreadableRecord as error:
            problem, unreadable = str(error), True
        return cls(
            id=message.sequence,
            subject=message.subject,
            at=message.timestamp,
            headers=message.headers,
            data=message.data,
            letter=letter,
            problem=problem,
            unreadable=unreadable,
        )

    def check_understood(self) -> None:
        """Raise UnreadableRecord if this program does not understand it."""
        if self.unreadable:
            raise UnreadableRecord(f"dead letter {self.id} stays as it is: {self.problem}")

    @property
    def reason(self) -> str:
        """Why it is here."""
        return self.letter.reason if self.letter is not None else self.problem or ""

    @property
    def origin(self) -> str:
        """Who gave up; of what is no letter, what its subject says."""
        return self.letter.origin if self.letter is not None else self.subject.partition(".")[2]


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of a letter; `put_at` is the sequence at which it was put back."""

    fate: Fate
    put_at: int = 0


class LetterBox:
    """See the module. All of it is empty while the queue does not exist."""

    def __init__(self, queues: "Queues") -> None:
        self._queues = queues
        self._stream = DEAD_LETTERS.stream

    async def scan(self, subject: str = LETTERS, after: int = 0) -> AsyncIterator[Parked]:
        """What lies on a subject, from a letter on, the oldest first."""
        more = True
        while more:
            wanted = Wanted(subject=subject, from_sequence=after + 1, count=_PAGE)
            try:
                page = await read_page(self._queues, self._stream, wanted)
            except UnknownStream:
                return
            for message in page.messages:
                after = message.sequence
                yield Parked.of(message)
            more = page.more and bool(page.messages)

    async def find(self, number: int) -> Parked | None:
        """A letter, asked of the leader: whether it is there is true."""
        if not 0 < number < _END:
            return None
        try:
            message = await self._queues.streams.get(self._stream, number)
        except (UnknownMessage, UnknownStream):
            return None
        is_receipt = message.subject.startswith(f"{SETTLED}.") and FATE in message.headers
        return None if is_receipt else Parked.of(message)

    async def counts(self) -> dict[str, int]:
        """How many letters there are, by the token of their origin."""
        try:
            found = await self._queues.streams.subjects(self._stream, LETTERS)
        except UnknownStream:
            return {}
        return {subject.partition(".")[2]: count for subject, count in found.items()}

    async def receipt(self, parked: Parked) -> Receipt | None:
        """What became of a letter, if that was decided; UnreadableRecord if a newer program decided it."""
        try:
            message = await self._queues.streams.get_last(self._stream, receipt_subject(parked))
        except (UnknownMessage, UnknownStream):
            return None
        try:
            return Receipt(Fate(first(message.headers, FATE)), int(first(message.headers, PUT_AT) or 0))
        except ValueError as error:
            what = f"the receipt of dead letter {parked.id} is not understood: {error}"
            raise UnreadableRecord(what, fix=UPGRADE) from error

    async def settle(self, parked: Parked, fate: Fate, put_at: int = 0) -> None:
        """Note what became of a letter. Done twice it is the same."""
        carried = {name: values for name, values in parked.headers.items() if _CARRIED.fullmatch(name)}
        headers = carried | {
            FATE: (fate.value,),
            LETTER: (str(parked.id),),
            _SETTLED_AT: (datetime.now(UTC).isoformat(),),
            **({PUT_AT: (str(put_at),)} if put_at else {}),
        }
        await self._queues.publish(
            receipt_subject(parked),
            headers=headers,
            msg_id=f"settled-{parked.id}-{fate.value}",
            expect=Expect(stream=self._stream),
        )

    async def keep(self, kept: timedelta, *, replicas: int = 1) -> None:
        """Keep letters and receipts for so long, and no longer; zero: for ever."""
        (await self._queues.ensure(DEAD_LETTERS, replicas=replicas)).require_usable()
        config = (await self._queues.streams.info(self._stream)).config
        if config.max_age != kept:
            await self._queues.streams.update(self._stream, {"max_age": kept})

    async def remove(self, number: int) -> bool:
        """Take a letter out; whether it was there. Of many who do so at once, one is told yes."""
        try:
            await self._queues.streams.delete_message(self._stream, number)
        except (UnknownMessage, UnknownStream):
            return False
        except Refused:  # also the answer when it is gone
            if await self.find(number) is None:
                return False
            raise
        return True


def receipt_subject(parked: Parked) -> str:
    """Where the receipt of a letter lies."""
    return f"{SETTLED}.{parked.subject.removeprefix('dead-letters.').replace('.', '-')}.{parked.id}"


def subjects_of(origins: Sequence[str]) -> tuple[str, ...]:
    """The subjects of the letters of some origins."""
    return tuple(dict.fromkeys(f"dead-letters.{token(origin)}" for origin in origins))
