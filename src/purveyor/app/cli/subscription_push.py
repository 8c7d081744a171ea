"""The push flags of `purveyor subscription add` and `edit`.

A secret is never a flag, because every user of the machine can read the flags of a process. The program generates it
and shows it once, reads it from a file, or names an environment variable of the push worker.
"""

from dataclasses import dataclass, field
from typing import Annotated

import typer

from purveyor.app.cli.parsers import parse_seconds
from purveyor.app.cli.secret_input import read_first_line
from purveyor.app.subscription_input import SECRET_GRACE_FIELD
from purveyor.delivery.push.push_request import generate_secret
from purveyor.model.delivery_policy import FROM_ENVIRONMENT, AckCodes, AfterDeadLetter, PushFormat
from purveyor.model.errors import InvalidInput
from purveyor.model.json_fields import Json

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
    """The flags that only push has; None where a flag is missing."""

    urls: list[str] | None = None
    ack_deadline: str | None = None
    format: PushFormat | None = None
    ack_codes: AckCodes | None = None
    after: AfterDeadLetter | None = None
    secret: str | None = field(default=None, repr=False)
    secret_generated: bool = False
    bearer: str | None = field(default=None, repr=False)
    keep_secret: str | None = None

    def options(self) -> Json:
        """Return the flags as the fields of `push` in the API."""
        given: Json = {}
        if self.urls:
            given["endpoints"] = list(self.urls)
        if self.ack_deadline is not None:
            given["ack_deadline_seconds"] = parse_seconds(self.ack_deadline)
        for name, word in (("format", self.format), ("ack_codes", self.ack_codes), ("after_dead_letter", self.after)):
            if word is not None:
                given[name] = word.value
        for name, value in (("secret", self.secret), ("bearer_token", self.bearer)):
            if value is not None:
                given[name] = value
        if self.keep_secret is not None:
            given[SECRET_GRACE_FIELD] = parse_seconds(self.keep_secret)
        return given

    def secret_json(self) -> dict[str, str]:
        """Return a generated secret for JSON output."""
        return {"secret": self.secret or ""} if self.secret_generated else {}

    def secret_line(self) -> str:
        """Return a generated secret as a line of text."""
        return f"The secret, which is not shown again: {self.secret}" if self.secret_generated else ""


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
