"""How a push subscription is delivered: to which endpoints, in which form, and what counts as an acknowledgement.

Secrets stand in a definition only as references: `env:NAME`, or `sealed:...`, encrypted with a key that lies elsewhere.
Names begin with `PURVEYOR_PUSH_SECRET_`: whoever may add a subscription can have such a variable sent to any endpoint,
and must not be able to name other variables of the push worker.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from purveyor.model import json_fields
from purveyor.model.errors import InvalidInput
from purveyor.model.json_fields import Json

DEFAULT_ACK_DEADLINE_SECONDS: Final = 10.0
SHORTEST_ACK_DEADLINE_SECONDS: Final = 0.1
LONGEST_ACK_DEADLINE_SECONDS: Final = 600.0
MOST_ENDPOINTS: Final = 32
SEALED: Final = "sealed:"
FROM_ENVIRONMENT: Final = "env:"
SECRET_PREFIX: Final = "PURVEYOR_PUSH_SECRET_"
"""How the names of variables begin that a definition may refer to."""
HIDDEN: Final = "***"
"""What is shown in place of a sealed secret; given back in a change it means: as it is."""

_LONGEST_ENDPOINT: Final = 2000
_REFERENCE: Final = re.compile(rf"{FROM_ENVIRONMENT}[A-Za-z_][A-Za-z0-9_]{{0,127}}|{SEALED}[A-Za-z0-9_=-]{{1,4000}}")
_PORTS: Final = {"http": 80, "https": 443}
_FIELDS: Final = (
    *("endpoint", "endpoints", "ack_deadline_seconds", "format", "ack_codes", "after_dead_letter"),
    *("secret", "old_secret", "old_secret_until", "bearer_token"),
)


class PushFormat(Enum):
    """What an endpoint gets."""

    PUBSUB = "pubsub"
    """A JSON object around the message, as Pub/Sub sends it."""
    RAW = "raw"
    """The event itself; what is known about it in headers."""
    CLOUDEVENTS = "cloudevents"
    """The event itself as a CloudEvent in binary mode."""


class AckCodes(Enum):
    """Which status codes acknowledge a message."""

    PUBSUB = "pubsub"
    ALL = "2xx"

    def acknowledges(self, status: int) -> bool:
        """Whether this one does.

        >>> AckCodes.PUBSUB.acknowledges(204), AckCodes.PUBSUB.acknowledges(206), AckCodes.ALL.acknowledges(206)
        (True, False, True)
        """
        return status in _PUBSUB_CODES if self is AckCodes.PUBSUB else status == 102 or 200 <= status <= 299


_PUBSUB_CODES: Final = frozenset({102, 200, 201, 202, 204})


class AfterDeadLetter(Enum):
    """What becomes of the later messages about an object, when one about it was given up."""

    CONTINUE = "continue"
    PARK_KEY = "park_key"
    """They are parked with it, until none of that key is left among the dead letters."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A URL taken apart: where to connect, and what to ask for there."""

    url: str
    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, url: str) -> "Endpoint":
        """Checked; InvalidInput tells what is wrong. Who may be reached is a matter of settings, checked elsewhere.

        >>> Endpoint.parse("https://shop.example/in?a=1")
        Endpoint(url='https://shop.example/in?a=1', scheme='https', host='shop.example', port=443, path='/in?a=1')
        """
        if not 0 < len(url) <= _LONGEST_ENDPOINT or not url.isascii() or not url.isprintable() or " " in url:
            raise _invalid(url, f"use 1 to {_LONGEST_ENDPOINT} printable ASCII characters, others percent-encoded")
        try:
            found = urlsplit(url)
            host, port = found.hostname, found.port
        except ValueError as error:
            raise _invalid(url, str(error)) from None
        if found.scheme not in _PORTS or not host:
            raise _invalid(url, "write https://host/path")
        if port == 0:
            raise _invalid(url, "nobody listens on port 0")
        if "@" in found.netloc:
            raise _invalid(_without_login(found), "leave user and password out: set bearer_token or secret")
        if found.fragment:
            raise _invalid(url, "leave out what follows '#': it is never sent")
        path = (found.path or "/") + (f"?{found.query}" if found.query else "")
        return cls(url, found.scheme, host, port or _PORTS[found.scheme], path)

    @property
    def origin(self) -> tuple[str, str, int]:
        """Who gets what is sent: scheme, host and port."""
        return self.scheme, self.host, self.port

    @property
    def authority(self) -> str:
        """What stands in the header `Host`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """See the module."""

    endpoints: tuple[str, ...]
    """Several share the messages."""
    ack_deadline_seconds: float = DEFAULT_ACK_DEADLINE_SECONDS
    """An answer that is not whole by then counts as none."""
    format: PushFormat = PushFormat.PUBSUB
    ack_codes: AckCodes = AckCodes.PUBSUB
    after_dead_letter: AfterDeadLetter = AfterDeadLetter.CONTINUE
    secret: str | None = field(default=None, repr=False)
    """What messages are signed with, as a reference."""
    old_secret: str | None = field(default=None, repr=False)
    """The one before, with which they are signed as well ..."""
    old_secret_until: datetime | None = None
    """... until then."""
    bearer_token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= len(self.endpoints) <= MOST_ENDPOINTS:
            raise InvalidInput(f"push to {len(self.endpoints)} endpoints", fix=f"give 1 to {MOST_ENDPOINTS}")
        for url in self.endpoints:
            Endpoint.parse(url)
        if not SHORTEST_ACK_DEADLINE_SECONDS <= self.ack_deadline_seconds <= LONGEST_ACK_DEADLINE_SECONDS:
            raise InvalidInput(
                f"an acknowledgement deadline of {self.ack_deadline_seconds:g} seconds",
                fix=f"give {SHORTEST_ACK_DEADLINE_SECONDS:g} to {LONGEST_ACK_DEADLINE_SECONDS:g}",
            )
        for reference in (self.secret, self.old_secret, self.bearer_token):
            if reference is not None and not _REFERENCE.fullmatch(reference):
                raise InvalidInput(
                    "a secret in a definition that is neither encrypted nor a reference",
                    fix=f"give env:{SECRET_PREFIX}..., the name of a variable in the environment of the push worker",
                )
        if (self.old_secret is None) != (self.old_secret_until is None):
            raise InvalidInput("an old secret without its end, or an end without one", fix="give both, or neither")

    @property
    def targets(self) -> tuple[Endpoint, ...]:
        """Its endpoints, taken apart."""
        return tuple(map(Endpoint.parse, self.endpoints))

    @classmethod
    def from_json(cls, data: object) -> "Push":
        """Checked; InvalidInput names the field that is wrong. One `endpoint`, or several `endpoints`."""
        given = json_fields.mapping(data, "push settings")
        json_fields.only(given, _FIELDS, "push settings")
        until = given.get("old_secret_until")
        return cls(
            endpoints=_endpoints(given),
            ack_deadline_seconds=_seconds(given, "ack_deadline_seconds", DEFAULT_ACK_DEADLINE_SECONDS),
            format=_member(PushFormat, given, "format", PushFormat.PUBSUB),
            ack_codes=_member(AckCodes, given, "ack_codes", AckCodes.PUBSUB),
            after_dead_letter=_member(AfterDeadLetter, given, "after_dead_letter", AfterDeadLetter.CONTINUE),
            secret=_text(given, "secret"),
            old_secret=_text(given, "old_secret"),
            old_secret_until=None if until is None else json_fields.moment(given, "old_secret_until", "push settings"),
            bearer_token=_text(given, "bearer_token"),
        )

    def to_json(self) -> Json:
        """As `from_json` takes it; what is as it would be without being said is left out. Not to be shown."""
        given: Json = (
            {"endpoint": self.endpoints[0]} if len(self.endpoints) == 1 else {"endpoints": list(self.endpoints)}
        )
        if self.ack_deadline_seconds != DEFAULT_ACK_DEADLINE_SECONDS:
            given["ack_deadline_seconds"] = float(self.ack_deadline_seconds)
        if self.format is not PushFormat.PUBSUB:
            given["format"] = self.format.value
        if self.ack_codes is not AckCodes.PUBSUB:
            given["ack_codes"] = self.ack_codes.value
        if self.after_dead_letter is not AfterDeadLetter.CONTINUE:
            given["after_dead_letter"] = self.after_dead_letter.value
        for name, value in (
            ("secret", self.secret),
            ("old_secret", self.old_secret),
            ("bearer_token", self.bearer_token),
        ):
            if value is not None:
                given[name] = value
        if self.old_secret_until is not None:
            given["old_secret_until"] = self.old_secret_until.astimezone(UTC).isoformat()
        return given

    def shown(self) -> Json:
        """The same for people and programs that ask: nothing of a secret but that there is one."""
        given = self.to_json()
        for name in ("secret", "old_secret", "bearer_token"):
            if str(given.get(name, "")).startswith(SEALED):
                given[name] = HIDDEN
        return given


def secret_variable(reference: str) -> str:
    """Return the name of the variable that a reference `env:NAME` means; InvalidInput if it may not be referred to.

    >>> secret_variable("env:PURVEYOR_PUSH_SECRET_SHOP")
    'PURVEYOR_PUSH_SECRET_SHOP'
    """
    name = reference.removeprefix(FROM_ENVIRONMENT)
    if not name.startswith(SECRET_PREFIX) or name == SECRET_PREFIX:
        raise InvalidInput(
            f"the environment variable {name[:128]} is none for secrets of push",
            fix=f"rename it for the push worker so that it begins with {SECRET_PREFIX}, and give that name",
        )
    return name


def _endpoints(given: Mapping[str, Any]) -> tuple[str, ...]:
    one, several = given.get("endpoint"), given.get("endpoints")
    if (one is None) == (several is None):
        raise InvalidInput("push needs an endpoint", fix="give `endpoint`, a URL, or `endpoints`, a list of them")
    found = [one] if several is None else several
    if not isinstance(found, list) or not all(isinstance(url, str) for url in found):
        raise InvalidInput(f"{json_fields.kind(found)} is no value for the endpoints", fix="give URLs")
    return tuple(dict.fromkeys(found))


def _seconds(given: Mapping[str, Any], name: str, default: float) -> float:
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidInput(f"{json_fields.kind(value)} is no value for {name!r}", fix="give a number of seconds")
    return float(value)


def _member(kinds: type[Any], given: Mapping[str, Any], name: str, default: Any) -> Any:
    return default if given.get(name) is None else json_fields.member(kinds, given, name, "push settings")


def _text(given: Mapping[str, Any], name: str) -> str | None:
    return None if given.get(name) is None else json_fields.text(given, name, "push settings")


def _without_login(found: SplitResult) -> str:
    return found._replace(netloc=found.netloc.rpartition("@")[2]).geturl()


def _invalid(url: str, fix: str) -> InvalidInput:
    return InvalidInput(f"invalid endpoint {url[:200]!r}", fix=fix)
