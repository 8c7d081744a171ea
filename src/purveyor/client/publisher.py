"""A publisher of events over the HTTP API: one event, or any number in batches, with ids that a retry repeats.

The API recognises an event that is sent again with its id for two minutes. So the patience ends before that, and a
program that calls again later gives the same ids within that time, or looks whether the events arrived.

The API stores the events of a request all or none. `publish_many` finds the events that it refuses by dividing the
request, and the others are stored.
"""

import json
import ssl
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from purveyor.client.api_client import ApiAccess, ApiClient, RequestRefused, authorization_header
from purveyor.model.errors import InvalidInput
from purveyor.model.event import Event, check_event, check_event_id

_PATH: Final = "v1/messages"
_MAX_EVENTS_PER_REQUEST: Final = 1000
_MAX_REQUEST_BYTES: Final = 8 << 20
"""Half of the body that the API takes."""
_MAX_PATIENCE_SECONDS: Final = 80.0
"""With the time of the last request shorter than the two minutes in which the API recognises a repetition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherOptions:
    """Options of a publisher. The defaults suit most programs."""

    patience_seconds: float = 60.0
    """How long the API may be unavailable before a request fails with Unavailable; 80 seconds at most."""
    tls: ssl.SSLContext | None = None
    """For an API with a certificate that the system does not know."""

    def __post_init__(self) -> None:
        if not 0 < self.patience_seconds <= _MAX_PATIENCE_SECONDS:
            raise InvalidInput(
                f"a patience of {self.patience_seconds:g} s", fix=f"give up to {_MAX_PATIENCE_SECONDS:g}"
            )


@dataclass(frozen=True, slots=True)
class Published:
    """A stored event."""

    position: int
    id: str
    duplicate: bool
    """It was stored before, with the same id."""


@dataclass(frozen=True, slots=True)
class PublishedMany:
    """The stored events of a batch."""

    position: int
    """The position of the last one; 0 if there is none."""
    stored: int
    duplicates: int
    """The number of those that were stored before, with the same ids."""


@dataclass(frozen=True, slots=True)
class RefusedEvent:
    """An event that the API did not take: its place in the given ones, its id, and the error, which names the field."""

    index: int
    id: str
    error: InvalidInput


class EventsRefused(InvalidInput):
    """Some events of a batch were refused; the others are stored, as `published` says."""

    def __init__(self, refused: Sequence[RefusedEvent], published: PublishedMany) -> None:
        first = refused[0]
        super().__init__(
            f"{len(refused)} events were refused; event {first.index} ({first.id}): {first.error.message}",
            fix=first.error.fix,
        )
        self.refused = tuple(refused)
        self.published = published


@dataclass(frozen=True, slots=True)
class _Event:
    """An event as JSON text, its place in the given ones, and its id."""

    index: int
    id: str
    text: bytes


class Publisher:
    """Publishes events as one login.

    >>> async with Publisher("http://127.0.0.1:7777", "events", password="secret") as publisher:  # doctest: +SKIP
    ...     await publisher.publish(Event(publisher_name="hr", ts=now, realm="udm", topic="users/user", new=ada))

    An event is a `purveyor.Event`, or a mapping of the fields that the API takes. It is stored when the method returns.
    The publisher waits while the API is unavailable. A login that the API does not accept is `AuthenticationFailed`, a
    realm that it may not publish into `PermissionDenied`.
    """

    def __init__(
        self,
        url: str,
        username: str = "events",
        *,
        password: str | None = None,
        token: str | None = None,
        options: PublisherOptions | None = None,
    ) -> None:
        self.options = options or PublisherOptions()
        self._api = ApiClient(ApiAccess(url, authorization_header(username, password, token), self.options.tls))

    async def __aenter__(self) -> Self:
        await self._api.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._api.__aexit__(kind, error, trace)

    async def publish(
        self,
        event: Event | Mapping[str, Any],
        *,
        id: str | None = None,  # noqa: A002 - it is the id of the event
    ) -> Published:
        """Store one event; InvalidInput names the field that is wrong. All attempts of a call have the same id.

        After `Unavailable` the event may be stored or not: a call with the same `id` within two minutes stores it once.
        """
        sent = _encode(event, _id_of(event, id), 0)
        answer = await self._api.call("POST", _PATH, sent.text, patience_seconds=self.options.patience_seconds)
        return Published(answer["position"], answer["id"], answer["duplicate"])

    async def publish_many(
        self, events: Sequence[Event | Mapping[str, Any]], *, ids: Sequence[str] | None = None
    ) -> PublishedMany:
        """Store events in their order, in requests of up to 1000.

        Raises `EventsRefused`, with each refused event and its error, when all others are stored. After `Unavailable`
        the first of them are stored: a call with the same `ids` within two minutes stores each once.
        """
        if ids is not None and len(ids) != len(events):
            raise InvalidInput(f"{len(ids)} ids for {len(events)} events", fix="give one for each, or none")
        if ids is not None and len({*ids}) < len(ids):
            raise InvalidInput("two of the events have the same id", fix="give each its own")
        refused: list[RefusedEvent] = []
        encoded: list[_Event] = []
        for index, event in enumerate(events):
            identity = _id_of(event, None if ids is None else ids[index])
            try:
                encoded.append(_encode(event, identity, index))
            except InvalidInput as error:
                refused.append(RefusedEvent(index, identity, error))
        total = PublishedMany(0, 0, 0)
        for chunk in _chunks(encoded):
            total = await self._publish_chunk(chunk, total, refused)
        if refused:
            raise EventsRefused(sorted(refused, key=lambda each: each.index), total)
        return total

    async def _publish_chunk(
        self, chunk: Sequence[_Event], total: PublishedMany, refused: list[RefusedEvent]
    ) -> PublishedMany:
        """Store a chunk; divide it when the API refuses it, so that only the invalid events stay out."""
        body = b"[" + b",".join(each.text for each in chunk) + b"]"
        try:
            answer = await self._api.call("POST", _PATH, body, patience_seconds=self.options.patience_seconds)
        except RequestRefused as error:
            if len(chunk) == 1:
                refused.append(RefusedEvent(chunk[0].index, chunk[0].id, error))
                return total
            middle = len(chunk) // 2
            total = await self._publish_chunk(chunk[:middle], total, refused)
            return await self._publish_chunk(chunk[middle:], total, refused)
        position = max(answer["position"], total.position)
        return PublishedMany(position, total.stored + answer["stored"], total.duplicates + answer["duplicates"])


def _id_of(event: Event | Mapping[str, Any], given: str | None) -> str:
    """Return the id of an event: the given one, its own, or a new one."""
    own = event.get("id") if isinstance(event, Mapping) else None
    return given or (own if isinstance(own, str) else None) or str(uuid.uuid4())


def _encode(event: Event | Mapping[str, Any], identity: str, index: int) -> _Event:
    """Return an event as JSON. The rules of the edge run here already for an `Event`; the API checks it again."""
    fields = dict(event) if isinstance(event, Mapping) else check_event(event)[0].to_json()
    check_event_id(identity)
    try:
        text = json.dumps({**fields, "id": identity}, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"the event has no JSON form: {error}", fix="give text, numbers, lists, objects") from None
    return _Event(index, identity, text.encode())


def _chunks(events: Sequence[_Event]) -> Iterator[list[_Event]]:
    """Divide events into requests by number and size; an event that is larger goes alone."""
    chunk: list[_Event] = []
    size = 0
    for event in events:
        if chunk and (len(chunk) >= _MAX_EVENTS_PER_REQUEST or size + len(event.text) > _MAX_REQUEST_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(event)
        size += len(event.text)
    if chunk:
        yield chunk
