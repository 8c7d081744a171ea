"""The JetStream API: how requests are written, how replies are read, what errors mean; and `Api`, which sends requests.

The asynchronous client and the bulk path share the rules, so the same reply has the same meaning and the same error
text in both. Only `Api` and the two functions after it send. Nothing here imports `nats`: the driver of a Spark query
loads this module.
"""

import asyncio
import base64
import json
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from purveyor.jetstream import headers as header_codec
from purveyor.jetstream.headers import Headers
from purveyor.model.errors import (
    AlreadyExists,
    ConfigRefused,
    InvalidConfig,
    NoAnswer,
    PublishRefused,
    PurveyorError,
    Refused,
    ServerUnavailable,
    SetupError,
    Unavailable,
    UnknownConsumer,
    UnknownMessage,
    UnknownStream,
    WrongRevision,
)
from purveyor.model.retries import Backoff, RetryDelays

if TYPE_CHECKING:
    from purveyor.jetstream.client import JetStream
    from purveyor.jetstream.connection import Connection

Json = dict[str, Any]

MIN_SERVER_VERSION: Final = (2, 14)
"""The first version with batched direct get, atomic batches and consumer reset."""
API_PREFIX: Final = "$JS.API."
_RETRY_BACKOFF: Final = Backoff(0.05, 1.0)
NO_RESPONDERS: Final = 503
"""The status of a reply that the server sends when no program listens on a subject."""

# The server's err_codes on which a caller acts.
STREAM_NOT_FOUND = 10059
CONSUMER_NOT_FOUND = 10014
CONSUMER_DOES_NOT_EXIST = 10149
MESSAGE_NOT_FOUND = 10037
STREAM_NAME_IN_USE = 10058
CONSUMER_NAME_IN_USE = 10013
CONSUMER_EXISTS = 10148
SUBJECTS_OVERLAP = 10065
ID_IN_PROCESS = 10158
STREAM_SEALED = 10109
MESSAGE_TOO_LARGE = 10054
HEADERS_TOO_LARGE = 10097
WRONG_LAST_SEQUENCE = 10071
WRONG_LAST_SEQUENCE_UNKNOWN = 10164
TOO_MANY_REQUESTS = 429
"""A status, not an err_code: the stream has too many messages to store and dropped this one."""
NOT_READY = (10008, 10009, 10118)
JETSTREAM_NOT_ENABLED = (10039, 10076)
NO_SUITABLE_PEERS = 10005

_ZERO_TIME = "0001-01-01"

FIXES = {
    TOO_MANY_REQUESTS: "the stream has too many messages to store: publish from fewer clients at the same time",
    10060: "publish to a subject of the expected stream",
    10174: "switch allow_atomic on for the stream, or publish pipelined",
    10176: "all messages of an atomic batch must go to one stream",
    SUBJECTS_OVERLAP: "another stream takes one of these subjects; see `purveyor stream ls`",
    STREAM_SEALED: "the stream is sealed; wait for its migration, or remove it",
    10023: "the disk or the store of the NATS server is full: free disk space, or raise max_file_store",
    10047: "free disk space, or raise max_file_store",
    10077: "the stream is at its limit of messages and discards new ones",
    MESSAGE_TOO_LARGE: "the message is larger than the stream's maximum",
    HEADERS_TOO_LARGE: "move large values from the headers to the body",
    10122: "the stream is at its limit of messages per subject",
    10099: "a work queue takes one consumer per subject: remove it, or use an interest stream",
    10100: "consumers of a work queue may not overlap: give each its own filter",
    10101: "a work queue's consumer must deliver all",
    10098: "a work queue's consumer must acknowledge explicitly",
    NO_SUITABLE_PEERS: "the cluster has too few servers for that many replicas",
    10074: "replicas need a cluster of that many servers",
}
_TEMPORARY_ERRORS: Final = frozenset({*NOT_READY, ID_IN_PROCESS})

DIRECT_GET_HEADERS: Final = (
    "Nats-Stream",
    "Nats-Subject",
    "Nats-Sequence",
    "Nats-Time-Stamp",
    "Nats-Num-Pending",
    "Nats-Last-Sequence",
)
"""The headers that the server appends to each message of a batched direct get, in this order."""


def parse_time(text: str) -> datetime | None:
    """Parse RFC 3339 with up to nine fractional digits; return None for an empty text or Go's zero time."""
    if not text or text.startswith(_ZERO_TIME):
        return None
    body, zone = (text[:-1], "+00:00") if text.endswith("Z") else (text[:-6], text[-6:])
    whole, _, fraction = body.partition(".")
    return datetime.fromisoformat(f"{whole}.{(fraction + '000000')[:6]}{zone}")


def format_time(moment: datetime) -> str:
    """Return an aware time as RFC 3339 in UTC."""
    if moment.tzinfo is None:
        raise InvalidConfig(
            f"the time {moment.isoformat()} has no time zone", fix="use an aware datetime, for example in UTC"
        )
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class Resource:
    """The stream, consumer or message that an API request is about, for error texts."""

    stream: str = ""
    consumer: str = ""
    sequence: int = 0

    @classmethod
    def from_api_subject(cls, subject: str) -> "Resource":
        """Return the resource that the subject of an API request names.

        >>> str(Resource.from_api_subject("CONSUMER.INFO.ORDERS.DISPATCH"))
        "consumer 'DISPATCH' of stream 'ORDERS'"
        """
        kind, *words = subject.split(".")
        names = words[2:] if words[:2] in (["MSG", "GET"], ["MSG", "DELETE"], ["MSG", "NEXT"]) else words[1:]
        return cls(names[0] if names else "", names[1] if kind == "CONSUMER" and len(names) > 1 else "")

    def __str__(self) -> str:
        if self.consumer:
            return f"consumer {self.consumer!r} of stream {self.stream!r}"
        return f"stream {self.stream!r}" if self.stream else "JetStream"


class Receipt(NamedTuple):
    """The server's acknowledgement of a stored message. A duplicate was stored before, at that sequence."""

    stream: str
    sequence: int
    duplicate: bool = False


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """A reply that reports an error: a status of NATS, or the error of JetStream."""

    code: int
    err_code: int
    reason: str
    stream: str = field(default="", compare=False)
    """The stream that reported the error, where the reply names it."""

    @classmethod
    def from_json(cls, error: Json, stream: str = "") -> "ErrorReply":
        """Read the server's `{code, err_code, description}`."""
        reason = str(error.get("description", "unknown error"))
        return cls(int(error.get("code", 500)), int(error.get("err_code", 0)), reason, stream)

    @property
    def has_no_responders(self) -> bool:
        """Whether no program listens on the subject: no stream takes it, or its stream has no leader at the moment."""
        return self.code == NO_RESPONDERS and not self.err_code

    @property
    def is_temporary(self) -> bool:
        """Whether the server itself says that a later attempt may succeed."""
        return is_temporary_error(self.code, self.err_code)

    @property
    def is_sealed(self) -> bool:
        """Whether the stream takes no more messages: for good, or until its migration is over."""
        return self.err_code == STREAM_SEALED

    @property
    def is_in_process(self) -> bool:
        """Whether the stream is storing a message with this id: a repeated publish finds it stored, or stores it."""
        return self.err_code == ID_IN_PROCESS


NOT_A_STREAM_REPLY: Final = ErrorReply(0, 0, "the reply is not from a stream: another service listens on this subject")


class PageEnd(Enum):
    """How a page of a batched direct get ended."""

    COMPLETE = auto()
    """The stream has no further message for this request."""
    HAS_MORE = auto()
    UNAVAILABLE = auto()
    """No replica answered."""


def is_temporary_error(code: int, err_code: int) -> bool:
    """Return whether a publish with this error should be repeated after a pause.

    The stream has no leader or is offline, stores a message with the same id right now, or has too many messages to
    store.
    """
    return err_code in _TEMPORARY_ERRORS or code == TOO_MANY_REQUESTS


def encode_request(body: object = None) -> bytes:
    """Return the payload of an API request."""
    return b"" if body is None else json.dumps(body).encode()


def parse_api_reply(data: bytes, about: Resource) -> Json:
    """Return the JSON of an API reply; raise the server's error as an error of our tree."""
    parsed: Json = json.loads(data)
    if "error" in parsed:
        raise to_error(ErrorReply.from_json(parsed["error"]), about)
    return parsed


def parse_publish_reply(payload: bytes) -> Receipt | ErrorReply:
    """Read a stream's reply to a publish; NOT_A_STREAM_REPLY for anything else."""
    try:
        body: Any = json.loads(payload)
        error = body.get("error")
        if error:
            return ErrorReply.from_json(error, str(body.get("stream") or ""))
        return Receipt(str(body["stream"]), int(body["seq"]), bool(body.get("duplicate", False)))
    except (ValueError, KeyError, TypeError, AttributeError):
        return NOT_A_STREAM_REPLY


def decode_stored_data(message: Json) -> bytes:
    """Return the payload of the `message` in a reply to `STREAM.MSG.GET`."""
    return base64.b64decode(message.get("data") or "")


def decode_stored_headers(message: Json) -> Headers:
    """Return the headers of the `message` in a reply to `STREAM.MSG.GET`."""
    block = base64.b64decode(message.get("hdrs") or "")
    return header_codec.decode(block).headers if block else {}


def encode_pull_request(
    count: int, *, expires_seconds: float, heartbeat_seconds: float | None = None, max_bytes: int | None = None
) -> bytes:
    """Return the payload of a pull request; one that expires at once does not wait for new messages."""
    body: Json = {"batch": count}
    if expires_seconds > 0:
        body["expires"] = int(expires_seconds * 1e9)
    else:
        body["no_wait"] = True
    if heartbeat_seconds:
        body["idle_heartbeat"] = int(heartbeat_seconds * 1e9)
    if max_bytes:
        body["max_bytes"] = max_bytes
    return encode_request(body)


def encode_page_request(sequence: int, *, count: int, max_bytes: int, subject: str | None) -> bytes:
    """Return the payload of a batched direct get from a sequence on; `subject` None: of all subjects."""
    body: Json = {"seq": max(sequence, 1), "batch": count, "max_bytes": max_bytes}
    if subject:
        body["next_by_subj"] = subject
    return encode_request(body)


def parse_page_end(stream: str, status: int, description: str, *, has_pending: bool) -> PageEnd:
    """Return how a direct get page ended, by the status of its last reply; raise Refused for an unknown status."""
    match status:
        case 204:
            return PageEnd.HAS_MORE if has_pending else PageEnd.COMPLETE
        case 404:
            return PageEnd.COMPLETE
        case 503:
            return PageEnd.UNAVAILABLE
        case _:
            raise Refused(f"a direct get from stream {stream!r} was refused: {description}", code=status)


def to_error(error: ErrorReply, about: Resource, *, publishing: bool = False) -> PurveyorError:
    """Return the server's error as an error of our tree."""
    code, err_code, text = error.code, error.err_code, error.reason
    numbers: dict[str, int] = {"code": code, "err_code": err_code}
    if err_code == STREAM_NOT_FOUND:
        return UnknownStream(f"no stream {about.stream!r}", fix="`purveyor stream ls` lists them")
    if err_code in (CONSUMER_NOT_FOUND, CONSUMER_DOES_NOT_EXIST):
        return UnknownConsumer(
            f"no consumer {about.consumer!r} on stream {about.stream!r}",
            fix=f"`purveyor consumer ls {about.stream}` lists them",
        )
    if err_code == MESSAGE_NOT_FOUND:
        where = f" at sequence {about.sequence}" if about.sequence else ""
        return UnknownMessage(f"no message{where} in stream {about.stream!r}")
    if err_code in NOT_READY:
        return NoAnswer(f"{about}: JetStream is not ready ({text})", fix="try again")
    if err_code in JETSTREAM_NOT_ENABLED:
        return SetupError(f"JetStream is not enabled: {text}", fix="enable it for the server and the account")
    if err_code in (WRONG_LAST_SEQUENCE, WRONG_LAST_SEQUENCE_UNKNOWN):
        return WrongRevision(f"{about}: {text}", fix="read again, then write", **numbers)
    fix = FIXES.get(err_code)
    message = f"{about}: {text} (code {code}, {err_code})"
    if publishing:
        return PublishRefused(f"message not stored in {message}", fix=fix, **numbers)
    if err_code in (STREAM_NAME_IN_USE, CONSUMER_NAME_IN_USE, CONSUMER_EXISTS):
        return AlreadyExists(message, fix="choose another name, or update what is there", **numbers)
    if code == 503:
        return NoAnswer(message, fix="try again")
    return (ConfigRefused if code in (400, 500) else Refused)(message, fix=fix, **numbers)


class Api:
    """Sends requests to the JetStream API and waits for a lost server up to the connection's `patience_seconds`.

    Every request may be repeated: creating, updating, deleting and purging twice has the same result as once.
    """

    def __init__(self, connection: "Connection") -> None:
        self.connection = connection

    async def request(self, subject: str, body: object = None, *, about: Resource | None = None) -> Json:
        """Return the JSON of the reply; raise the server's error as an error of our tree."""
        about = about or Resource()
        payload = encode_request(body)
        give_up = time.monotonic() + self.connection.patience_seconds
        delays = RetryDelays(_RETRY_BACKOFF)
        while True:
            try:
                return await self._request_once(subject, payload, about, give_up - time.monotonic())
            except Unavailable:
                delay_seconds = delays.next_seconds()
                if time.monotonic() + delay_seconds > give_up:
                    raise
            await asyncio.sleep(delay_seconds)

    async def _request_once(self, subject: str, payload: bytes, about: Resource, left_seconds: float) -> Json:
        await self.connection.wait_until_connected(max(left_seconds, 0.1))
        reply = await self.connection.request(API_PREFIX + subject, payload)
        if reply.status == NO_RESPONDERS and not self.connection.offers_jetstream:
            raise SetupError(
                f"the NATS server at {self.connection.address} has no JetStream", fix="start it with JetStream enabled"
            )
        if reply.status == NO_RESPONDERS:
            raise ServerUnavailable(
                f"{about}: the JetStream API does not answer at {self.connection.address}",
                fix="is JetStream enabled on that server?",
            )
        return parse_api_reply(reply.data, about)

    async def request_pages(self, subject: str, key: str, body: Json | None = None) -> list[Any]:
        """Return the items of all pages of a listing."""
        items: list[Any] = []
        while True:
            page = await self.request(subject, {**(body or {}), "offset": len(items)})
            found = page.get(key) or []
            items += found
            if not found or len(items) >= int(page.get("total", 0)):
                return items


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The use of JetStream by this account and its limits; None means no limit."""

    storage: int
    streams: int
    consumers: int
    max_storage: int | None
    max_streams: int | None
    max_consumers: int | None


async def account(jetstream: "JetStream") -> Account:
    """Return the use and limits of this account; raise SetupError if the server has no JetStream."""
    found = await Api(jetstream.connection).request("INFO")
    limits = found.get("limits") or {}
    return Account(
        storage=int(found.get("storage") or 0),
        streams=int(found.get("streams") or 0),
        consumers=int(found.get("consumers") or 0),
        max_storage=_limit(limits.get("max_storage")),
        max_streams=_limit(limits.get("max_streams")),
        max_consumers=_limit(limits.get("max_consumers")),
    )


def _limit(value: int | None) -> int | None:
    return None if value is None or value <= 0 else int(value)


async def clock_offset_seconds(jetstream: "JetStream", stream: str) -> float | None:
    """Return by how much the server's clock is ahead of ours; None if the server does not report its time.

    The error is at most half the duration of a request.
    """
    before = time.monotonic()
    found = await jetstream.streams.raw_info(stream)
    now, took = datetime.now(UTC), time.monotonic() - before
    there = parse_time(str(found.get("ts") or ""))
    return None if there is None else (there - now).total_seconds() + took / 2
