"""The flags of `purveyor subscription add` and `edit` that are about push, and what they come to.

A secret is never a flag, where everybody on the machine could read it: it is made up and shown once, read from a file,
or left in an environment variable of the push worker and named.
"""

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Annotated, Final

import typer

from purveyor.app.cli.parsers import parse_duration
from purveyor.app.cli.subscription_password import read_first_line
from purveyor.app.push_input import GRACE, PushEdge
from purveyor.delivery.push.signing import new_secret
from purveyor.model.delivery_policy import Delivery, OrderBy, RetryPolicy, default_order
from purveyor.model.errors import InvalidInput
from purveyor.model.json_fields import Json
from purveyor.model.push_config import (
    FROM_ENVIRONMENT,
    HIDDEN,
    AckCodes,
    AfterDeadLetter,
    PushFormat,
)
from purveyor.model.subscription import Subscription

DEFAULT_ATTEMPTS: Final = 5
_PUSH_MAX_BACKOFF_SECONDS: Final = 60.0


class Order(Enum):
    """What the order of messages is kept by."""

    POSITION = "position"
    KEY = "key"
    NONE = "none"


PushUrls = Annotated[
    list[str] | None,
    typer.Option("--push", metavar="URL", help="Push messages there; repeatable: several share them."),
]
AckDeadline = Annotated[
    str | None,
    typer.Option("--ack-deadline", metavar="DURATION", help="An answer must be there by then; default: 10s."),
]
MaxAttempts = Annotated[
    int | None, typer.Option("--max-attempts", metavar="N", help="After so many a message becomes a dead letter.")
]
MinBackoff = Annotated[
    str | None, typer.Option("--min-backoff", metavar="DURATION", help="The pause after a failure; it doubles ...")
]
MaxBackoff = Annotated[
    str | None, typer.Option("--max-backoff", metavar="DURATION", help="... up to this; default: 1s to 60s.")
]
OrderOption = Annotated[Order | None, typer.Option("--order-by", help="What order is kept; position is strict.")]
DeadLetters = Annotated[
    bool, typer.Option("--dead-letter", help=f"Give up after --max-attempts, or {DEFAULT_ATTEMPTS} of them.")
]
FormatOption = Annotated[PushFormat | None, typer.Option("--format", help="What the endpoint gets; default: pubsub.")]
CodesOption = Annotated[
    AckCodes | None, typer.Option("--ack-codes", help="What acknowledges; default: pubsub (102, 200, 201, 202, 204).")
]
AfterOption = Annotated[
    AfterDeadLetter | None,
    typer.Option("--after-dead-letter", help="What becomes of later messages of its key; default: continue."),
]
MakeSecret = Annotated[bool, typer.Option("--secret", help="Sign messages: make up a secret, and show it this once.")]
SecretFile = Annotated[
    str | None, typer.Option("--secret-file", metavar="FILE|-", help="Sign with the secret in the file's first line.")
]
SecretEnv = Annotated[
    str | None,
    typer.Option(
        "--secret-env", metavar="PURVEYOR_PUSH_SECRET_...", help="Sign with that variable of the push worker."
    ),
]
BearerFile = Annotated[
    str | None, typer.Option("--bearer-file", metavar="FILE|-", help="Send the token in the file's first line.")
]
BearerEnv = Annotated[
    str | None,
    typer.Option("--bearer-env", metavar="PURVEYOR_PUSH_SECRET_...", help="Send that variable of the push worker."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PushFlags:
    """What was given; None where nothing was."""

    urls: list[str] | None = None
    ack_deadline: str | None = None
    max_attempts: int | None = None
    min_backoff: str | None = None
    max_backoff: str | None = None
    order_by: Order | None = None
    dead_letter: bool = False
    format: PushFormat | None = None
    ack_codes: AckCodes | None = None
    after: AfterDeadLetter | None = None
    secret: str | None = field(default=None, repr=False)
    secret_made: bool = False
    bearer: str | None = field(default=None, repr=False)
    keep_secret: str | None = None

    @property
    def settings(self) -> Json:
        """As the API takes them."""
        given: Json = {}
        if self.urls:
            given["endpoints"] = list(self.urls)
        if self.ack_deadline is not None:
            given["ack_deadline_seconds"] = _seconds(self.ack_deadline)
        for name, word in (("format", self.format), ("ack_codes", self.ack_codes), ("after_dead_letter", self.after)):
            if word is not None:
                given[name] = word.value
        for name, value in (("secret", self.secret), ("bearer_token", self.bearer)):
            if value is not None:
                given[name] = value
        if self.keep_secret is not None:
            given[GRACE] = _seconds(self.keep_secret)
        return given

    def shown(self) -> dict[str, str]:
        """A secret that was made up, for JSON."""
        return {"secret": self.secret or ""} if self.secret_made else {}

    def line(self) -> str:
        """The same for people."""
        return f"Its secret, which is not shown again: {self.secret}" if self.secret_made else ""

    def check_pushed(self) -> None:
        """Refuse flags of push without an endpoint."""
        alone = self.settings or self.order_by or self.dead_letter or self.max_attempts is not None
        if not self.urls and (alone or self.min_backoff or self.max_backoff):
            raise InvalidInput("flags for push without an endpoint", fix="add --push URL")

    def added(self, to: Subscription, edge: PushEdge, existing: Subscription | None) -> Subscription:
        """A new subscription that is pushed; the same if it is not."""
        if not self.urls:
            return to
        settings, known = self.settings, None if existing is None else existing.push
        if self.secret_made and known is not None and known.secret is not None:
            settings["secret"] = HIDDEN  # asked for again: it has one
        retry = RetryPolicy(
            max_attempts=DEFAULT_ATTEMPTS if self.dead_letter else None, max_backoff_seconds=_PUSH_MAX_BACKOFF_SECONDS
        )
        return replace(
            to,
            delivery=Delivery.PUSH,
            order_by=self._order(default_order(Delivery.PUSH)),
            retry=self._retry(retry),
            push=edge.added(settings, known),
        )

    def changed(self, to: Subscription, edge: PushEdge) -> Subscription:
        """A subscription with what was given."""
        if to.push is None and not self.urls:
            raise InvalidInput(f"subscription {to.name!r} is not pushed", fix="add --push URL to have it pushed")
        kept = to.order_by if to.delivery is Delivery.PUSH else default_order(Delivery.PUSH)
        return replace(
            to,
            delivery=Delivery.PUSH,
            order_by=self._order(kept),
            retry=self._retry(to.retry),
            push=edge.changed(self.settings, to.push),
        )

    def _order(self, kept: OrderBy | None) -> OrderBy | None:
        if self.order_by is None:
            return kept
        return None if self.order_by is Order.NONE else OrderBy(self.order_by.value)

    def _retry(self, kept: RetryPolicy) -> RetryPolicy:
        least = kept.min_backoff_seconds if self.min_backoff is None else _seconds(self.min_backoff)
        most = kept.max_backoff_seconds if self.max_backoff is None else _seconds(self.max_backoff)
        attempts = kept.max_attempts if self.max_attempts is None else self.max_attempts
        if attempts is None and self.dead_letter:
            attempts = DEFAULT_ATTEMPTS
        most = max(least, most) if self.max_backoff is None else most
        return RetryPolicy(max_attempts=attempts, min_backoff_seconds=least, max_backoff_seconds=most)


def chosen_secret(*, make: bool, file: str | None, env: str | None) -> tuple[str | None, bool]:
    """The secret by its flags, and whether it was made up."""
    if make + (file is not None) + (env is not None) > 1:
        raise InvalidInput("more than one way to a secret", fix="give one of --secret, --secret-file, --secret-env")
    if make:
        return new_secret(), True
    return (_from_file(file, "secret", "--secret-file") if env is None else FROM_ENVIRONMENT + env), False


def chosen_bearer(*, file: str | None, env: str | None) -> str | None:
    """The bearer token by its flags."""
    if file is not None and env is not None:
        raise InvalidInput("more than one way to a token", fix="give one of --bearer-file, --bearer-env")
    return _from_file(file, "token", "--bearer-file") if env is None else FROM_ENVIRONMENT + env


def _from_file(file: str | None, what: str, flag: str) -> str | None:
    if file is None:
        return None
    found = read_first_line(file, what, flag)
    if not found or found.startswith(FROM_ENVIRONMENT):
        raise InvalidInput(f"there is no {what} in the first line of {file}", fix=f"check {flag}")
    return found


def _seconds(text: str) -> float:
    """A duration; a bare number is one of seconds."""
    try:
        return float(text)
    except ValueError:
        return parse_duration(text).total_seconds()
