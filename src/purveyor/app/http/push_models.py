"""Push settings in the bodies of requests and answers. Secrets come in, and never go out."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from purveyor.model.delivery_policy import LONGEST_DELAY_SECONDS
from purveyor.model.json_fields import Json
from purveyor.model.push_config import (
    LONGEST_ACK_DEADLINE_SECONDS,
    MOST_ENDPOINTS,
    SHORTEST_ACK_DEADLINE_SECONDS,
)

_LONGEST_URL = 2000
_LONGEST_SECRET = 2000
Url = Annotated[str, Field(min_length=1, max_length=_LONGEST_URL, examples=["https://shop.example/events"])]
GivenSecret = Annotated[SecretStr, Field(min_length=1, max_length=_LONGEST_SECRET)]
AckDeadline = Annotated[
    float, Field(ge=SHORTEST_ACK_DEADLINE_SECONDS, le=LONGEST_ACK_DEADLINE_SECONDS, allow_inf_nan=False)
]
Grace = Annotated[float, Field(ge=0, le=LONGEST_DELAY_SECONDS, allow_inf_nan=False)]


class PushBody(BaseModel):
    """Where and how messages are pushed: to one `endpoint`, or to several `endpoints` that share them.

    A change that leads to another host (scheme, host or port) gives `secret` and `bearer_token` again.
    """

    model_config = ConfigDict(extra="forbid")

    endpoint: Url | None = None
    endpoints: Annotated[list[Url], Field(min_length=1, max_length=MOST_ENDPOINTS)] | None = None
    ack_deadline_seconds: AckDeadline | None = Field(default=None, description="default: 10")
    format: Literal["pubsub", "raw", "cloudevents"] | None = Field(default=None, description="default: pubsub")
    ack_codes: Literal["pubsub", "2xx"] | None = Field(
        default=None, description="pubsub (default): 102, 200, 201, 202, 204"
    )
    after_dead_letter: Literal["continue", "park_key"] | None = Field(
        default=None, description="park_key: later messages of the same key are parked with one that is given up"
    )
    secret: GivenSecret | None = Field(
        default=None,
        description="to sign with: whsec_..., or env:PURVEYOR_PUSH_SECRET_..., a variable of the push worker",
    )
    secret_grace_seconds: Grace | None = Field(
        default=None, description="for so long the last secret signs as well; default: a day"
    )
    bearer_token: GivenSecret | None = Field(default=None, description="the token, or env:PURVEYOR_PUSH_SECRET_...")

    def settings(self) -> Json:
        """What was given, secrets as they are: for `PushEdge` alone."""
        given: Json = self.model_dump(mode="json", exclude_unset=True, exclude={"secret", "bearer_token"})
        for name in ("secret", "bearer_token"):
            if name in self.model_fields_set:
                value: SecretStr | None = getattr(self, name)
                given[name] = None if value is None else value.get_secret_value()
        return given


class TroubleBody(BaseModel):
    """Why nothing is sent, and since when a worker knows."""

    reason: str
    since: str


class PushShown(BaseModel):
    """Push settings as they are shown: of a secret, that there is one, or the variable that holds it."""

    endpoint: str | None = None
    endpoints: list[str] | None = None
    ack_deadline_seconds: float | None = None
    format: str | None = None
    ack_codes: str | None = None
    after_dead_letter: str | None = None
    secret: str | None = None
    old_secret: str | None = None
    old_secret_until: str | None = None
    bearer_token: str | None = None
