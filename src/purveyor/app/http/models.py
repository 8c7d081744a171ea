"""Bodies of requests and answers about subscriptions, and the types that all routes share, for pydantic and OpenAPI.

These models check the form of a body. `purveyor.model` (`Subscription.from_json` and others) checks the rules.
"""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, field_validator, model_validator

from purveyor.app.json_views import expired_json, replay_json
from purveyor.app.subscription_input import PushInput, changed_definition, new_definition
from purveyor.delivery.pull import MAX_WAIT_SECONDS
from purveyor.model.ack_ranges import Expired
from purveyor.model.control_events import ReplayPoint
from purveyor.model.delivery_policy import (
    LONGEST_ACK_DEADLINE_SECONDS,
    LONGEST_DELAY_SECONDS,
    LONGEST_LEASE_SECONDS,
    LONGEST_RETENTION_SECONDS,
    MOST_ENDPOINTS,
    SHORTEST_ACK_DEADLINE_SECONDS,
    SHORTEST_RETENTION_SECONDS,
)
from purveyor.model.errors import InvalidInput
from purveyor.model.json_fields import Json, check_json, check_surrogates
from purveyor.model.registration import PrefillStatus, RecordState
from purveyor.model.subscription import RealmTopic, Subscription, read_topics
from purveyor.queues.registry import Registered, Unreadable

_NAME_PATTERN = "^[A-Za-z0-9_-]{1,64}$"
_MAX_NESTING = 1000
MAX_PASSWORD_LENGTH = 1024

Seconds = Annotated[float, Field(ge=0, le=LONGEST_DELAY_SECONDS, allow_inf_nan=False)]
RetentionSeconds = Annotated[
    float, Field(ge=SHORTEST_RETENTION_SECONDS, le=LONGEST_RETENTION_SECONDS, allow_inf_nan=False)
]
LeaseSeconds = Annotated[float, Field(ge=1, le=LONGEST_LEASE_SECONDS, allow_inf_nan=False)]
Wait = Annotated[float, Field(ge=0, le=MAX_WAIT_SECONDS, allow_inf_nan=False)]
Password = Annotated[SecretStr, Field(min_length=1, max_length=MAX_PASSWORD_LENGTH)]
Sequence = Annotated[int, Field(ge=1, lt=1 << 63)]

_MAX_URL_LENGTH = 2000
_MAX_SECRET_LENGTH = 2000
Url = Annotated[str, Field(min_length=1, max_length=_MAX_URL_LENGTH, examples=["https://shop.example/events"])]
SecretInput = Annotated[SecretStr, Field(min_length=1, max_length=_MAX_SECRET_LENGTH)]
AckDeadline = Annotated[
    float, Field(ge=SHORTEST_ACK_DEADLINE_SECONDS, le=LONGEST_ACK_DEADLINE_SECONDS, allow_inf_nan=False)
]
Grace = Annotated[float, Field(ge=0, le=LONGEST_DELAY_SECONDS, allow_inf_nan=False)]


def _is_text(value: object) -> object:
    if not isinstance(value, str):
        raise ValueError("a position from 1 on, or a time such as 2026-01-01T12:00:00Z")  # noqa: TRY004 - pydantic's way
    return value


Time = Annotated[datetime, BeforeValidator(_is_text)]
"""Not a number, which pydantic would take for seconds since 1970."""


class RequestBody(BaseModel):
    """The body of a request. An unknown field is an error."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _check_values(cls, given: object) -> object:
        """Refuse values that JSON or UTF-8 cannot hold, at any depth: lone surrogates, NaN, infinity."""
        try:
            check_json(given, "it", most_levels=_MAX_NESTING)
            check_surrogates(given, "it")
        except InvalidInput as error:
            raise ValueError(error.message) from None
        return given


class ProblemBody(BaseModel):
    """An error: what happened (`detail`) and what to do (`fix`)."""

    title: str
    status: int
    detail: str
    fix: str | None
    errors: list[dict[str, str]] | None = None


class TopicBody(RequestBody):
    """A realm and a topic: exact, or a regular expression that must match in full."""

    realm: str = Field(min_length=1, examples=["udm"])
    topic: str = Field(min_length=1, examples=["users/user"])


class FilterBody(RequestBody):
    """Only events in which every named attribute and field has one of these values."""

    attributes: dict[str, str | list[str]] = Field(default_factory=dict, examples=[{"tenant": ["north"]}])
    fields: dict[str, Any] = Field(default_factory=dict, examples=[{"department": ["it"], "level": [3, 4]}])


class RetryBody(RequestBody):
    """When the API delivers a failed message again, and when it gives up."""

    max_attempts: Annotated[int, Field(ge=1)] | None = Field(default=None, description="null: no limit")
    min_backoff_seconds: Seconds = 1.0
    max_backoff_seconds: Seconds = 600.0


class PushBody(BaseModel):
    """Where and how the push worker sends messages: to one `endpoint`, or to several `endpoints` that share them.

    A change to another host (scheme, host or port) must contain `secret` and `bearer_token` again.
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
        default=None,
        description="park_key: after a dead letter, later messages of the same key become dead letters too",
    )
    secret: SecretInput | None = Field(
        default=None,
        description="the key for signatures: whsec_..., or env:PURVEYOR_PUSH_SECRET_..., a variable of the push worker",
    )
    secret_grace_seconds: Grace | None = Field(
        default=None, description="seconds for which the previous secret also signs; default: a day"
    )
    bearer_token: SecretInput | None = Field(default=None, description="the token, or env:PURVEYOR_PUSH_SECRET_...")

    def settings(self) -> Json:
        """Return the given fields with secrets in clear, for the check of push input only."""
        given: Json = self.model_dump(mode="json", exclude_unset=True, exclude={"secret", "bearer_token"})
        for name in ("secret", "bearer_token"):
            if name in self.model_fields_set:
                value: SecretStr | None = getattr(self, name)
                given[name] = None if value is None else value.get_secret_value()
        return given


class EndpointFailureBody(BaseModel):
    """An endpoint that accepts no messages: since when, the failed attempts, and how the last one ended."""

    endpoint: str
    since: str
    attempts: int
    status: int | None = Field(default=None, description="the status of the last answer")
    error: str | None = Field(default=None, description="why there was no answer")
    breaker: str = Field(description="closed, open or half open")
    window: int = Field(description="how many messages may be in flight")


class PushProblemBody(BaseModel):
    """Why a push worker sends nothing, and since when; with the endpoints that accept no messages."""

    reason: str
    since: str
    endpoints: list[EndpointFailureBody] = Field(default_factory=list)


class PushView(BaseModel):
    """Push settings without secrets: of a secret, only its existence or the name of its variable."""

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


class Options(RequestBody):
    """Options of delivery. The defaults suit a simple consumer."""

    filter: FilterBody | None = None
    hidden_fields: list[str] | None = Field(
        default=None, description="fields of the object that it does not get; default: hashes of passwords"
    )
    delivery: Literal["ordered", "parallel", "push"] | None = None
    order_by: Literal["position", "key"] | None = None
    lease_seconds: LeaseSeconds | None = None
    retry: RetryBody | None = None
    push: PushBody | None = None
    retention_seconds: RetentionSeconds | None = Field(
        default=None, description="an unacknowledged message expires after these seconds; null: never"
    )

    @property
    def push_settings(self) -> Json:
        """The push settings with secrets in clear, if they are given."""
        return {} if self.push is None else {"push": self.push.settings()}


class NewSubscription(Options):
    """A subscription to add."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "name": "ox",
                    "realms_topics": [{"realm": "udm", "topic": "users/user"}, {"realm": "udm", "topic": "groups/.*"}],
                    "request_prefill": True,
                    "password": "a long secret",
                }
            ]
        }
    )

    name: str = Field(json_schema_extra={"pattern": _NAME_PATTERN})
    realms_topics: list[TopicBody] = Field(min_length=1)
    request_prefill: bool = False
    password: Password | None = Field(
        default=None, description="its login; without one no client can pull its messages, which suits push"
    )

    @field_validator("password", mode="before")
    @classmethod
    def _check_not_null(cls, given: object) -> object:
        """Refuse null: it comes from a program whose password is missing. No password is the missing field."""
        if given is None:
            raise ValueError("a password is not null: leave it out for a subscription without a login")
        return given

    def definition(self, push_input: PushInput, existing: Subscription | None = None) -> Subscription:
        """Return the checked definition. `existing` is the stored subscription of this name, if any."""
        given = self.model_dump(mode="json", exclude={"password", "push"}, exclude_none=True)
        return new_definition({**given, **self.push_settings}, push_input, existing)


class SubscriptionChange(Options):
    """The fields to change. Other fields keep their values; null resets an option to its default."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"filter": {"fields": {"department": ["it"]}}},
                {"realms_topics": [{"realm": "udm", "topic": "users/.*"}], "prefill_new_topics": True},
                {"password": "the next secret", "password_grace_seconds": 3600},
            ]
        }
    )

    realms_topics: Annotated[list[TopicBody], Field(min_length=1)] | None = Field(
        default=None, description="all topics that it has from now on"
    )
    prefill_new_topics: bool = Field(
        default=False, description="deliver the current state of the objects of new topics first"
    )
    paused: bool | None = None
    password: Password | None = None
    password_grace_seconds: Seconds = Field(
        default=0, description="seconds for which the previous password stays valid"
    )
    keep_tokens: bool = Field(default=False, description="with a new password: tokens stay valid")

    @property
    def options(self) -> Json:
        """The options of the definition that the request sets."""
        given = self.model_dump(mode="json", exclude_unset=True)
        return {name: given[name] for name in ("realms_topics", *Options.model_fields) if name in given}

    def apply_to(self, to: Subscription, push_input: PushInput) -> Subscription:
        """Return the checked definition with the changes."""
        return changed_definition(to, {**self.options, **self.push_settings}, push_input)


class ExpiredBody(BaseModel):
    """Messages that expired before the consumer acknowledged them."""

    count: int
    position: int | None = Field(description="the position of the newest one")
    last: datetime = Field(description="when the last one expired")


class ReplayBody(BaseModel):
    """A replay. While it runs, the API delivers nothing; then it delivers the replayed events first."""

    job: str
    status: Literal["running", "done", "failed"]
    written: int
    total: int | None = Field(description="the number of events, when it is done")
    reason: str | None = Field(description="why it failed")


class SubscriptionBody(BaseModel):
    """A subscription. Options equal to their defaults are omitted."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "name": "ox",
                    "realms_topics": [{"realm": "udm", "topic": "users/user"}],
                    "request_prefill": True,
                    "prefill_queue_status": "done",
                }
            ]
        }
    )

    name: str
    realms_topics: list[TopicBody]
    request_prefill: bool
    prefill_queue_status: Literal["pending", "running", "failed", "done"]
    prefill_queue_reason: str | None = Field(default=None, description="why the prefill failed")
    replay: ReplayBody | None = Field(default=None, description="the replay that runs, or ran last")
    filter: FilterBody | None = None
    hidden_fields: list[str] | None = None
    delivery: Literal["ordered", "parallel", "push"] | None = None
    order_by: Literal["position", "key"] | None = None
    lease_seconds: float | None = None
    retry: RetryBody | None = None
    push: PushView | None = None
    push_trouble: PushProblemBody | None = Field(default=None, description="why the push worker does not send")
    retention_seconds: float | None = None
    expired: ExpiredBody | None = Field(default=None, description="messages that expired")
    paused: bool | None = Field(default=None, description="true: the API delivers no messages now")
    pause_reason: str | None = Field(default=None, description="the reason, if Purveyor paused it")
    in_force_after: int | None = Field(
        default=None,
        description="the position behind which topics, filter and hidden fields are in force, if they were changed",
    )
    suspended: dict[str, Any] | None = Field(
        default=None, description="the dispatcher writes nothing to its queue: from which position on, and why"
    )
    unreadable: str | None = Field(
        default=None,
        description="why this version of the API cannot read its record and does not serve it",
    )


def subscription_json(found: Registered, expired: Expired | None = None) -> Json:
    """Return a subscription in the form of `SubscriptionBody`."""
    status = prefill_status(found)
    body: Json = {**found.record.definition.to_public_json(), "prefill_queue_status": status.value}
    if status is PrefillStatus.FAILED and found.prefill is not None:
        body["prefill_queue_reason"] = found.prefill.reason
    if found.replay is not None:
        body["replay"] = replay_json(found.replay)
    if expired is not None and expired.count:
        body["expired"] = expired_json(expired)
    if found.record.past:
        body["in_force_after"] = found.record.past[-1].until
    if found.record.paused:
        body["paused"] = True
        if found.record.pause_reason is not None:
            body["pause_reason"] = found.record.pause_reason
    if found.suspended is not None:
        body["suspended"] = found.suspended.to_json()
    return body


def unreadable_json(found: Unreadable) -> Json:
    """Return a subscription with an unreadable record in the form of `SubscriptionBody`."""
    body: Json = {
        "name": found.name,
        "realms_topics": [],
        "request_prefill": False,
        "prefill_queue_status": PrefillStatus.PENDING.value,
        "unreadable": found.reason,
    }
    return body if found.suspended is None else {**body, "suspended": found.suspended.to_json()}


def prefill_status(found: Registered) -> PrefillStatus:
    """Return the status of its prefill. Without a requested prefill it is done; a replay comes after the prefill."""
    if found.prefill is not None:
        return PrefillStatus.DONE if found.prefill.is_replay else found.prefill.status
    unfinished = found.record.definition.request_prefill or found.record.state is RecordState.REGISTERING
    return PrefillStatus.PENDING if unfinished else PrefillStatus.DONE


class PrefillReport(RequestBody):
    """The status of the prefill of a subscription."""

    status: Literal["pending", "running", "failed", "done"] = Field(
        description="pending requests a failed prefill again"
    )
    reason: str | None = Field(default=None, max_length=2000, description="why it failed")


class PrefillBody(BaseModel):
    """How far a prefill is."""

    incarnation: str
    status: Literal["pending", "running", "failed", "done"]
    position: int = Field(description="the state as of this position")
    attempt: int
    total: int | None = Field(default=None, description="the number of messages, when it is known")
    written: int
    reason: str | None = Field(default=None, description="why it failed")
    job: str | None = None


class ReplayFilter(RequestBody):
    """Only events of these topics."""

    realms_topics: list[TopicBody]


class ReplayRequest(RequestBody):
    """Past events: from a position or a time up to another one, or up to now."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"from": 1, "to": 1300}]})

    from_: Annotated[Sequence | Time, Field(alias="from")]
    to: Sequence | Time | None = None
    filter: ReplayFilter | None = None

    def bounds(self) -> tuple[ReplayPoint, ReplayPoint | None]:
        """Return where to begin and where to end."""
        return self.from_, self.to

    def topics(self) -> tuple[RealmTopic, ...]:
        """Return the topics to replay; empty: all."""
        return () if self.filter is None else read_topics(self.filter.model_dump(), "realms_topics")


class ReplayStarted(BaseModel):
    """The job of a requested replay."""

    job: str
