"""The push flags of `purveyor subscription add` and `edit`, and the command `edit`.

A secret is never a flag, because every user of the machine can read the flags of a process. The program generates it
and shows it once, reads it from a file, or names an environment variable of the push worker.
"""

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Annotated, Final

import typer

from purveyor.app.cli.context import Cli, JsonFlag
from purveyor.app.cli.output import write, write_json
from purveyor.app.cli.parsers import parse_duration
from purveyor.app.cli.subscription_password import read_first_line
from purveyor.app.cli.subscription_view import status_json
from purveyor.app.push_input import SECRET_GRACE_FIELD, PushInput
from purveyor.delivery.push.push_request import generate_secret
from purveyor.delivery.subscriptions import Subscriptions, SubscriptionStatus, read_status
from purveyor.model.delivery_policy import (
    FROM_ENVIRONMENT,
    HIDDEN,
    AckCodes,
    AfterDeadLetter,
    Delivery,
    OrderBy,
    PushFormat,
    RetryPolicy,
    default_order,
)
from purveyor.model.errors import InvalidInput
from purveyor.model.json_fields import Json
from purveyor.model.subscription import Subscription
from purveyor.queues.client import Queues

DEFAULT_ATTEMPTS: Final = 5
_PUSH_MAX_BACKOFF_SECONDS: Final = 60.0


class Order(Enum):
    """The order in which messages are delivered."""

    POSITION = "position"
    KEY = "key"
    NONE = "none"


PushUrls = Annotated[
    list[str] | None,
    typer.Option(
        "--push", metavar="URL", help="Push messages to this endpoint; repeatable: several endpoints share them."
    ),
]
AckDeadline = Annotated[
    str | None,
    typer.Option("--ack-deadline", metavar="DURATION", help="How long an endpoint may take to answer; default: 10s."),
]
MaxAttempts = Annotated[
    int | None,
    typer.Option("--max-attempts", metavar="N", help="Failed attempts after which a message becomes a dead letter."),
]
MinBackoff = Annotated[
    str | None,
    typer.Option(
        "--min-backoff",
        metavar="DURATION",
        help="The delay after the first failure, which doubles with each; default: 1s.",
    ),
]
MaxBackoff = Annotated[
    str | None, typer.Option("--max-backoff", metavar="DURATION", help="The longest delay; default: 60s.")
]
OrderOption = Annotated[
    Order | None, typer.Option("--order-by", help="Keep the order of all messages, of each key, or none.")
]
DeadLetters = Annotated[
    bool,
    typer.Option("--dead-letter", help=f"Make a dead letter after --max-attempts, or {DEFAULT_ATTEMPTS} attempts."),
]
FormatOption = Annotated[PushFormat | None, typer.Option("--format", help="The format of requests; default: pubsub.")]
CodesOption = Annotated[
    AckCodes | None,
    typer.Option("--ack-codes", help="Status codes that acknowledge; default: pubsub (102, 200, 201, 202, 204)."),
]
AfterOption = Annotated[
    AfterDeadLetter | None,
    typer.Option("--after-dead-letter", help="What to do with later messages of its key; default: continue."),
]
MakeSecret = Annotated[
    bool, typer.Option("--secret", help="Sign messages with a generated secret, which is shown once.")
]
SecretFile = Annotated[
    str | None,
    typer.Option("--secret-file", metavar="FILE|-", help="Sign with the secret in the first line of a file."),
]
SecretEnv = Annotated[
    str | None,
    typer.Option(
        "--secret-env",
        metavar="PURVEYOR_PUSH_SECRET_...",
        help="Sign with this environment variable of the push worker.",
    ),
]
BearerFile = Annotated[
    str | None,
    typer.Option("--bearer-file", metavar="FILE|-", help="Send the bearer token in the first line of a file."),
]
BearerEnv = Annotated[
    str | None,
    typer.Option(
        "--bearer-env", metavar="PURVEYOR_PUSH_SECRET_...", help="Send this environment variable of the push worker."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PushFlags:
    """The push flags of a command; None where a flag is missing."""

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
    secret_generated: bool = False
    bearer: str | None = field(default=None, repr=False)
    keep_secret: str | None = None

    @property
    def settings(self) -> Json:
        """Return the flags as fields of the API."""
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
            given[SECRET_GRACE_FIELD] = _seconds(self.keep_secret)
        return given

    def secret_json(self) -> dict[str, str]:
        """Return a generated secret for JSON output."""
        return {"secret": self.secret or ""} if self.secret_generated else {}

    def secret_line(self) -> str:
        """Return a generated secret as a line of text."""
        return f"The secret, which is not shown again: {self.secret}" if self.secret_generated else ""

    def require_endpoint(self) -> None:
        """Raise InvalidInput for push flags without an endpoint."""
        alone = self.settings or self.order_by or self.dead_letter or self.max_attempts is not None
        if not self.urls and (alone or self.min_backoff or self.max_backoff):
            raise InvalidInput("push flags need an endpoint", fix="add --push URL")

    def add_to(self, to: Subscription, push_input: PushInput, existing: Subscription | None) -> Subscription:
        """Return a new subscription with the push flags; without an endpoint, the subscription unchanged."""
        if not self.urls:
            return to
        settings, known = self.settings, None if existing is None else existing.push
        if self.secret_generated and known is not None and known.secret is not None:
            settings["secret"] = HIDDEN  # the command is repeated: keep its secret
        retry = RetryPolicy(
            max_attempts=DEFAULT_ATTEMPTS if self.dead_letter else None, max_backoff_seconds=_PUSH_MAX_BACKOFF_SECONDS
        )
        return replace(
            to,
            delivery=Delivery.PUSH,
            order_by=self._order(default_order(Delivery.PUSH)),
            retry=self._retry(retry),
            push=push_input.parse_new(settings, known),
        )

    def apply_to(self, to: Subscription, push_input: PushInput) -> Subscription:
        """Return the subscription with the push flags applied."""
        if to.push is None and not self.urls:
            raise InvalidInput(f"subscription {to.name!r} has no endpoint", fix="add --push URL to change it to push")
        kept = to.order_by if to.delivery is Delivery.PUSH else default_order(Delivery.PUSH)
        return replace(
            to,
            delivery=Delivery.PUSH,
            order_by=self._order(kept),
            retry=self._retry(to.retry),
            push=push_input.parse_change(self.settings, to.push),
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


def choose_secret(*, make: bool, file: str | None, env: str | None) -> tuple[str | None, bool]:
    """Return the secret that the flags choose, and whether it was generated."""
    if make + (file is not None) + (env is not None) > 1:
        raise InvalidInput("more than one secret is given", fix="give one of --secret, --secret-file, --secret-env")
    if make:
        return generate_secret(), True
    return (_from_file(file, "secret", "--secret-file") if env is None else FROM_ENVIRONMENT + env), False


def choose_bearer(*, file: str | None, env: str | None) -> str | None:
    """Return the bearer token that the flags choose."""
    if file is not None and env is not None:
        raise InvalidInput("more than one bearer token is given", fix="give one of --bearer-file, --bearer-env")
    return _from_file(file, "token", "--bearer-file") if env is None else FROM_ENVIRONMENT + env


def _from_file(file: str | None, what: str, flag: str) -> str | None:
    if file is None:
        return None
    found = read_first_line(file, what, flag)
    if not found or found.startswith(FROM_ENVIRONMENT):
        raise InvalidInput(f"there is no {what} in the first line of {file}", fix=f"check {flag}")
    return found


def _seconds(text: str) -> float:
    """Parse a duration; a bare number means seconds."""
    try:
        return float(text)
    except ValueError:
        return parse_duration(text).total_seconds()


def edit(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The subscription.")],
    push: PushUrls = None,
    ack_deadline: AckDeadline = None,
    max_attempts: MaxAttempts = None,
    min_backoff: MinBackoff = None,
    max_backoff: MaxBackoff = None,
    order_by: OrderOption = None,
    dead_letter: DeadLetters = False,
    push_format: FormatOption = None,
    ack_codes: CodesOption = None,
    after_dead_letter: AfterOption = None,
    secret: MakeSecret = False,
    secret_file: SecretFile = None,
    secret_env: SecretEnv = None,
    keep_secret: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="How long to sign with the last secret as well; default: 24h."),
    ] = None,
    bearer_file: BearerFile = None,
    bearer_env: BearerEnv = None,
    as_json: JsonFlag = False,
) -> None:
    """Change the push settings of a subscription; others stay. With --push a pull subscription becomes push.

    For some time messages carry signatures of the new and of the last secret, so that the endpoint can change over.
    """
    signing_secret, is_generated = choose_secret(make=secret, file=secret_file, env=secret_env)
    flags = PushFlags(
        urls=push,
        ack_deadline=ack_deadline,
        max_attempts=max_attempts,
        min_backoff=min_backoff,
        max_backoff=max_backoff,
        order_by=order_by,
        dead_letter=dead_letter,
        format=push_format,
        ack_codes=ack_codes,
        after=after_dead_letter,
        secret=signing_secret,
        secret_generated=is_generated,
        bearer=choose_bearer(file=bearer_file, env=bearer_env),
        keep_secret=keep_secret,
    )
    if flags == PushFlags():
        raise InvalidInput(
            f"no change of subscription {name!r} is given", fix="see `purveyor subscription edit --help`"
        )
    cli = Cli.of(ctx, as_json)
    settings = cli.settings()
    push_input = PushInput.from_settings(settings)

    async def work(queues: Queues) -> SubscriptionStatus:
        subscriptions = Subscriptions(queues, replicas=settings.replicas)
        await subscriptions.redefine(name, lambda now: flags.apply_to(now, push_input))
        registry = await subscriptions.registry()
        return await read_status(queues, registry, await registry.get(name))

    found = cli.call(work)
    if cli.json:
        write_json({**status_json(found), **flags.secret_json()}, indent=2)
    else:
        write("\n".join(filter(None, (f"Changed subscription {name}", flags.secret_line()))))
