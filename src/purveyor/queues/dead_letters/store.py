"""The store of dead letters in the queue `dead-letters`: read letters, settle them, remove them.

The id of a letter is its sequence in the stream. A letter that is redriven or discarded leaves a receipt, on
`dead-letters.settled.<origin>.<sequence>`: the resolution, without the body. The receipt is written before the letter
is removed, so that every position stays accounted for, and a process that is cut off in between can continue.
"""

import re
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import TYPE_CHECKING, Final, TypeAlias

from purveyor.jetstream.headers import Headers, first
from purveyor.jetstream.publisher import Expect
from purveyor.jetstream.streams import PageRequest, StoredMessage, read_page
from purveyor.model.errors import InvalidInput, Refused, UnknownMessage, UnknownStream, UnreadableRecord
from purveyor.model.json_fields import UPGRADE
from purveyor.model.message_headers import DEAD_LETTER_SEQUENCE
from purveyor.queues.catalogue import DEAD_LETTERS
from purveyor.queues.dead_letters.letter import DeadLetter, subject_token

if TYPE_CHECKING:
    from purveyor.queues.client import Queues

LETTER_SUBJECTS: Final = "dead-letters.*"
"""The subjects of letters; those of receipts are longer."""
RECEIPT_PREFIX: Final = "dead-letters.settled"
RESOLUTION_HEADER: Final = "Purveyor-Fate"
_REDRIVEN_TO_HEADER: Final = "Purveyor-Put-At"
_SETTLED_AT: Final = "Purveyor-Settled-At"
_RECEIPT_HEADERS: Final = re.compile(r"Purveyor-(?!Original-|Details$).*|Purveyor-Original-(Purveyor-.*|Nats-Msg-Id)")
_IDENTITY: Final = ("Origin", "Subject", "Position", "First-Error", "Last-Error")
"""A queue that was created again repeats its positions, so the times belong to the identity."""
LetterIdentity: TypeAlias = tuple[str | None, ...]
_PAGE_LETTERS: Final = 200
_MAX_SEQUENCE: Final = 2**63


class Resolution(Enum):
    """How a letter was settled. The values are stored."""

    RETRIED = "retried"
    DISCARDED = "discarded"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkedMessage:
    """A message of the queue. If it is no dead letter, `letter` is None, and it can only be discarded: see `problem`.

    A message that this program does not understand is `unreadable`: it stays until a newer program settles it.
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
    def from_message(cls, message: StoredMessage) -> "ParkedMessage":
        """Decode a message of the queue, also one of another program."""
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
        """Raise UnreadableRecord if this program does not understand the message."""
        if self.unreadable:
            raise UnreadableRecord(f"dead letter {self.id} is not changed: {self.problem}")

    @property
    def reason(self) -> str:
        """Why it is parked."""
        return self.letter.reason if self.letter is not None else self.problem or ""

    @property
    def origin(self) -> str:
        """The part or queue that gave it up; for other messages, from the subject."""
        return self.letter.origin if self.letter is not None else self.subject.partition(".")[2]


@dataclass(frozen=True, slots=True)
class SettlementReceipt:
    """How a letter was settled; `redriven_to` is the sequence under which it was stored again, or 0."""

    resolution: Resolution
    redriven_to: int = 0


class DeadLetterStore:
    """Reads and settles dead letters. While the queue does not exist, it is empty."""

    def __init__(self, queues: "Queues") -> None:
        self._queues = queues
        self._stream = DEAD_LETTERS.stream

    async def scan(self, subject: str = LETTER_SUBJECTS, after: int = 0) -> AsyncIterator[ParkedMessage]:
        """Yield the messages of a subject after a letter, the oldest first."""
        more = True
        while more:
            wanted = PageRequest(subject=subject, from_sequence=after + 1, count=_PAGE_LETTERS)
            try:
                page = await read_page(self._queues, self._stream, wanted)
            except UnknownStream:
                return
            for message in page.messages:
                after = message.sequence
                yield ParkedMessage.from_message(message)
            more = page.has_more and bool(page.messages)

    async def find(self, number: int) -> ParkedMessage | None:
        """Read a letter from the leader of the stream, so that the answer is never stale."""
        if not 0 < number < _MAX_SEQUENCE:
            return None
        try:
            message = await self._queues.streams.get(self._stream, number)
        except (UnknownMessage, UnknownStream):
            return None
        is_receipt = message.subject.startswith(f"{RECEIPT_PREFIX}.") and RESOLUTION_HEADER in message.headers
        return None if is_receipt else ParkedMessage.from_message(message)

    async def find_parked(self, letters: Mapping[str, Collection[Headers]]) -> set[LetterIdentity]:
        """Return which letters are or were in the queue, also those that were redriven or discarded since.

        `letters` has the headers of letters by their subject. For a program that stores letters before it publishes
        them: it may publish one again after any time, and the server recognises the id for two minutes only.
        """
        found: set[LetterIdentity] = set()
        for subject, headers in letters.items():
            wanted = {identity_of(each) for each in headers}
            token = subject.removeprefix("dead-letters.")
            # In this order: a letter that is settled meanwhile has its receipt before it is removed.
            for pattern in (subject, f"{RECEIPT_PREFIX}.{token}.*"):
                async for parked in self.scan(pattern):
                    if (identity := identity_of(parked.headers)) in wanted:
                        found.add(identity)
        return found

    async def counts(self) -> dict[str, int]:
        """Count the letters, by the token of their origin."""
        try:
            found = await self._queues.streams.subjects(self._stream, LETTER_SUBJECTS)
        except UnknownStream:
            return {}
        return {subject.partition(".")[2]: count for subject, count in found.items()}

    async def find_receipt(self, parked: ParkedMessage) -> SettlementReceipt | None:
        """Return the receipt of a letter, if it was settled; UnreadableRecord if a newer program settled it."""
        try:
            message = await self._queues.streams.get_last(self._stream, receipt_subject(parked))
        except (UnknownMessage, UnknownStream):
            return None
        try:
            return SettlementReceipt(
                Resolution(first(message.headers, RESOLUTION_HEADER)),
                int(first(message.headers, _REDRIVEN_TO_HEADER) or 0),
            )
        except ValueError as error:
            what = f"the receipt of dead letter {parked.id} is not understood: {error}"
            raise UnreadableRecord(what, fix=UPGRADE) from error

    async def settle(self, parked: ParkedMessage, resolution: Resolution, redriven_to: int = 0) -> None:
        """Write the receipt of a letter; safe to repeat."""
        kept_headers = {name: values for name, values in parked.headers.items() if _RECEIPT_HEADERS.fullmatch(name)}
        headers = kept_headers | {
            RESOLUTION_HEADER: (resolution.value,),
            DEAD_LETTER_SEQUENCE: (str(parked.id),),
            _SETTLED_AT: (datetime.now(UTC).isoformat(),),
            **({_REDRIVEN_TO_HEADER: (str(redriven_to),)} if redriven_to else {}),
        }
        await self._queues.publish(
            receipt_subject(parked),
            headers=headers,
            msg_id=f"settled-{parked.id}-{resolution.value}",
            expect=Expect(stream=self._stream),
        )

    async def set_retention(self, max_age: timedelta, *, replicas: int = 1) -> None:
        """Set how long letters and receipts are kept; zero is for ever."""
        (await self._queues.ensure(DEAD_LETTERS, replicas=replicas)).require_usable()
        config = (await self._queues.streams.info(self._stream)).config
        if config.max_age != max_age:
            await self._queues.streams.update(self._stream, {"max_age": max_age})

    async def remove(self, number: int) -> bool:
        """Remove a letter; return True only to the caller that removed it."""
        try:
            await self._queues.streams.delete_message(self._stream, number)
        except (UnknownMessage, UnknownStream):
            return False
        except Refused:  # the server also answers so when the letter is gone
            if await self.find(number) is None:
                return False
            raise
        return True


def identity_of(headers: Headers) -> LetterIdentity:
    """Return what distinguishes a letter from all others; its receipt has the same."""
    return tuple(first(headers, f"Purveyor-{name}") for name in _IDENTITY)


def receipt_subject(parked: ParkedMessage) -> str:
    """Return the subject of the receipt of a letter."""
    return f"{RECEIPT_PREFIX}.{parked.subject.removeprefix('dead-letters.').replace('.', '-')}.{parked.id}"


def subjects_of(origins: Sequence[str]) -> tuple[str, ...]:
    """Return the subjects of the letters of some origins."""
    return tuple(dict.fromkeys(f"dead-letters.{subject_token(origin)}" for origin in origins))
