"""From one subscription to one endpoint: the requests, the window, and whether the endpoint is up."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from purveyor import __version__
from purveyor.delivery.push.circuit_breaker import Breaker, State
from purveyor.delivery.push.concurrency_window import Flow
from purveyor.delivery.push.http_pool import Host
from purveyor.delivery.push.payloads import CONTENT_TYPE, read, write
from purveyor.delivery.push.secret_encryption import SecretBox
from purveyor.delivery.push.signing import Signer, key_of
from purveyor.delivery.transitions import Delivered
from purveyor.model.errors import InvalidInput
from purveyor.model.push_config import Endpoint, Push
from purveyor.model.tracing import of_headers

_AGENT: Final = f"purveyor/{__version__}"


class Health:
    """The breaker of one endpoint, shared by all subscriptions that are pushed there."""

    def __init__(self) -> None:
        self.breaker = Breaker()
        self.listeners: set[Callable[[], None]] = set()
        """Called when it is up again."""
        self.refused = ""
        """Why push must not go there, if that was the last thing that was found out."""

    def state(self, now: float) -> State:
        """As of now."""
        return self.breaker.state(now)

    def succeeded(self) -> None:
        """It answered."""
        if self.breaker.until is not None or self.breaker.failures:
            was_open = self.breaker.until is not None
            self.breaker, self.refused = self.breaker.succeeded(), ""
            if was_open:
                for listener in [*self.listeners]:
                    listener()

    def failed(self, now: float) -> None:
        """It did not."""
        self.breaker = self.breaker.failed(now, random.random())  # noqa: S311 - only to spread the probes

    def asked_for_pause(self, now: float, seconds: float) -> None:
        """It wants to be left alone."""
        self.breaker = self.breaker.asked_for_pause(now, seconds)


@dataclass(frozen=True, slots=True)
class Secrets:
    """What a subscription signs with, opened."""

    keys: tuple[bytes, ...]
    old_keys: tuple[bytes, ...]
    """Those that are valid for a while."""
    old_until: float
    bearer: str | None

    @classmethod
    def open(cls, push: Push, box: SecretBox) -> "Secrets":
        """InvalidInput if one cannot be had."""
        bearer = None if push.bearer_token is None else box.open(push.bearer_token)
        if bearer is not None and not (bearer.isascii() and bearer.isprintable()):
            raise InvalidInput("the bearer token holds what no header can carry", fix="use printable ASCII")
        until = push.old_secret_until
        return cls(
            keys=() if push.secret is None else (key_of(box.open(push.secret)),),
            old_keys=() if push.old_secret is None else (key_of(box.open(push.old_secret)),),
            old_until=0.0 if until is None else until.timestamp(),
            bearer=bearer,
        )

    def signer(self, now: float) -> Signer:
        """With all that is valid at a time of the wall clock."""
        return Signer(self.keys + (self.old_keys if now < self.old_until else ()))


class Lane:
    """See the module."""

    def __init__(self, endpoint: Endpoint, health: Health, host: Host) -> None:
        self.endpoint = endpoint
        self.health = health
        self.host = host
        self.flow = Flow()
        self.under_way = 0
        self.probing = False
        """It may send one message, to see whether the endpoint is up again."""
        self.refused = ""
        """What was told of the endpoint: why push must not go there."""

    def adopt(self, subscription: str, push: Push, secrets: Secrets) -> None:
        """New settings; what was learnt of the endpoint stays."""
        self._subscription = subscription
        self._form = push.format
        self._secrets = secrets
        self._signer = secrets.signer(time.time())
        self._changes_at = secrets.old_until if time.time() < secrets.old_until else float("inf")
        bearer = "" if secrets.bearer is None else f"authorization: Bearer {secrets.bearer}\r\n"
        self._head = (
            f"POST {self.endpoint.path} HTTP/1.1\r\nhost: {self.endpoint.authority}\r\nuser-agent: {_AGENT}\r\n"
            f"accept: */*\r\ncontent-type: {CONTENT_TYPE}\r\n{bearer}"
        ).encode("latin-1")

    def room(self, now: float) -> int:
        """How many more messages may be sent."""
        if self.health.state(now) is State.CLOSED:
            return max(self.flow.window - self.under_way, 0)
        return 1 if self.probing and not self.under_way else 0

    def end_probe(self) -> None:
        """It was not used, or its outcome is known."""
        if self.probing:
            self.probing = False
            self.health.breaker = self.health.breaker.give_up_probe()

    def has_room(self, now: float) -> bool:
        """Whether there is any, quickly: asked for every message."""
        if self.health.breaker.until is None:
            return self.flow.size - self.under_way >= 1
        return self.room(now) > 0

    def request(self, message: Delivered) -> bytes:
        """The bytes to send."""
        now = time.time()
        if now >= self._changes_at:
            self._signer, self._changes_at = self._secrets.signer(now), float("inf")
        letter = read(message, self._subscription)
        body, lines = write(self._form, message, letter, self._subscription)
        signed = self._signer.headers(letter.id, int(now), body)
        found = of_headers(message.headers)
        trace = b"".join(b"%s: %s\r\n" % (name.encode(), value.encode()) for name, value in found.items())
        return b"%s%s%s%scontent-length: %d\r\n\r\n%s" % (self._head, lines, trace, signed, len(body), body)


def utc(seconds: float) -> datetime:
    """A time of the wall clock."""
    return datetime.fromtimestamp(seconds, UTC)
