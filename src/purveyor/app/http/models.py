"""The bodies of requests and answers, as pydantic reads them at the edge and OpenAPI shows them.

What they say is checked once more, and for good, by the model (`Subscription.from_json` and the like): here are forms,
there are rules.
"""

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator

from purveyor.app.http.push_models import PushBody, PushShown, TroubleBody
from purveyor.app.push_input import PushEdge
from purveyor.delivery.pull import LONGEST_WAIT_SECONDS
from purveyor.delivery.pull import MOST_AT_ONCE as MOST_LEASED
from purveyor.model.ack_ranges import Expired
from purveyor.model.control_events import Place
from purveyor.model.delivery_policy import (
    LONGEST_DELAY_SECONDS,
    LONGEST_LEASE_SECONDS,
    LONGEST_RETENTION_SECONDS,
    SHORTEST_RETENTION_SECONDS,
    Delivery,
)
from purveyor.model.errors import InvalidInput
from purveyor.model.json_fields import Json
from purveyor.model.json_limits import check_halves, check_json
from purveyor.model.registration import PrefillStatus, RecordState
from purveyor.model.subscription import RealmTopic, Subscription, read_topics
from purveyor.queues.registry import Registered, Unreadable

_NAME_PATTERN = "^[A-Za-z0-9_-]{1,64}$"
_MOST_LEVELS = 1000
LONGEST_PASSWORD = 1024

Seconds = Annotated[float, Field(ge=0, le=LONGEST_DELAY_SECONDS, allow_inf_nan=False)]
RetentionSeconds = Annotated[
    float, Field(ge=SHORTEST_RETENTION_SECONDS, le=LONGEST_RETENTION_SECONDS, allow_inf_nan=False)
]
LeaseSeconds = Annotated[float, Field(ge=1, le=LONGEST_LEASE_SECONDS, allow_inf_nan=False)]
Wait = Annotated[float, Field(ge=0, le=LONGEST_WAIT_SECONDS, allow_inf_nan=False)]
Password = Annotated[SecretStr, Field(min_length=1, max_length=LONGEST_PASSWORD)]
Sequence = Annotated[int, Field(ge=1, lt=1 << 63)]


def _is_text(value: object) -> object:
    if not isinstance(value, str):
        raise ValueError("a position from 1 on, or a time such as 2026-01-01T12:00:00Z")  # noqa: TRY004 - pydantic's way
    return value


Time = Annotated[datetime, BeforeValidator(_is_text)]
"""Not a number, which pydantic would take for seconds since 1970."""


class Given(BaseModel):
    """The body of a request: a field that nobody knows is a mistake."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _check_values(cls, given: object) -> object:
        """Refuse what has no place in JSON or UTF-8, wherever it is: half of a character, NaN, a number of no end."""
        try:
            check_json(given, "it", most_levels=_MOST_LEVELS)
            check_halves(given, "it")
        except InvalidInput as error:
            raise ValueError(error.message) from None
        return given


class ProblemBody(BaseModel):
    """What happened, and what to do."""

    title: str
    status: int
    detail: str
    fix: str | None
    errors: list[dict[str, str]] | None = None


class TopicBody(Given):
    """A realm and a topic: exact, or a regular expression that must match in full."""

    realm: str = Field(min_length=1, examples=["udm"])
    topic: str = Field(min_length=1, examples=["users/user"])


class FilterBody(Given):
    """Only events whose attributes and fields all have one of these values."""

    attributes: dict[str, str | list[str]] = Field(default_factory=dict, examples=[{"tenant": ["north"]}])
    fields: dict[str, Any] = Field(default_factory=dict, examples=[{"department": ["it"], "level": [3, 4]}])


class RetryBody(Given):
    """What becomes of a message that is not acknowledged."""

    max_attempts: Annotated[int, Field(ge=1)] | None = Field(default=None, description="null: for ever")
    min_backoff_seconds: Seconds = 1.0
    max_backoff_seconds: Seconds = 600.0


class Options(Given):
    """How a subscription wants its messages; what is left out is as a simple consumer expects it."""

    filter: FilterBody | None = None
    hidden_fields: list[str] | None = Field(
        default=None, description="fields of the object it never sees; default: hashes of passwords"
    )
    delivery: Literal["ordered", "parallel", "push"] | None = None
    order_by: Literal["position", "key"] | None = None
    lease_seconds: LeaseSeconds | None = None
    retry: RetryBody | None = None
    push: PushBody | None = None
    retention_seconds: RetentionSeconds | None = Field(
        default=None, description="after so long an unacknowledged message expires; null: never"
    )


class NewSubscription(Options):
    """A subscription to be added."""

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
    password: Password

    def definition(self, edge: PushEdge, existing: Subscription | None = None) -> Subscription:
        """Checked by the rules. `existing` is the one of its name, if there is one."""
        given = self.model_dump(mode="json", exclude={"password", "push"}, exclude_none=True)
        if self.push is not None:
            push = edge.added(self.push.settings(), None if existing is None else existing.push)
            given["push"] = push.to_json()
        return Subscription.from_json(given)


class SubscriptionChange(Options):
    """What is given is changed, the rest stays; null puts an option back to its default."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"filter": {"fields": {"department": ["it"]}}},
                {"password": "the next secret", "password_grace_seconds": 3600},
            ]
        }
    )

    paused: bool | None = None
    password: Password | None = None
    password_grace_seconds: Seconds = Field(default=0, description="for so long the last password is valid as well")
    keep_tokens: bool = Field(
        default=False, description="with a password: tokens stay valid, and do not end with the last"
    )

    @property
    def options(self) -> Json:
        """The options of the definition that are given."""
        given = self.model_dump(mode="json", exclude_unset=True)
        return {name: given[name] for name in Options.model_fields if name in given}

    def applied(self, to: Subscription, edge: PushEdge) -> Subscription:
        """The definition with what is given; checked by the rules."""
        changed, options = to.to_json(), self.options
        if "delivery" in options and "order_by" not in options:
            changed.pop("order_by", None)
        if "delivery" in options and options["delivery"] != Delivery.PUSH.value:
            changed.pop("push", None)
        changed |= options
        if self.push is not None:
            changed["push"] = edge.changed(self.push.settings(), to.push).to_json()
        return Subscription.from_json({name: value for name, value in changed.items() if value is not None})


class ExpiredBody(BaseModel):
    """Messages that nobody acknowledged in time."""

    count: int
    position: int | None = Field(description="the newest event among them")
    last: datetime = Field(description="when the last of them went")


class SubscriptionBody(BaseModel):
    """A subscription. Options that are as they are by default are left out."""

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
    filter: FilterBody | None = None
    hidden_fields: list[str] | None = None
    delivery: Literal["ordered", "parallel", "push"] | None = None
    order_by: Literal["position", "key"] | None = None
    lease_seconds: float | None = None
    retry: RetryBody | None = None
    push: PushShown | None = None
    push_trouble: TroubleBody | None = Field(default=None, description="why it is not pushed, though it should be")
    retention_seconds: float | None = None
    expired: ExpiredBody | None = Field(default=None, description="what nobody acknowledged in time")
    paused: bool | None = Field(default=None, description="true: nothing is handed out at present")
    pause_reason: str | None = Field(default=None, description="why, if it was not a person who paused it")
    suspended: dict[str, Any] | None = Field(
        default=None, description="nothing is written to its queue: from where on, and why"
    )
    unreadable: str | None = Field(
        default=None,
        description="why this API does not understand it, and does not serve it",
    )


def subscription_json(found: Registered, expired: Expired | None = None) -> Json:
    """A subscription as `SubscriptionBody` describes it."""
    status = prefill_status(found)
    body: Json = {**found.record.definition.shown(), "prefill_queue_status": status.value}
    if status is PrefillStatus.FAILED and found.prefill is not None:
        body["prefill_queue_reason"] = found.prefill.reason
    if expired is not None and expired.count:
        last = datetime.fromtimestamp(expired.at / 1000, UTC)
        body["expired"] = {"count": expired.count, "position": expired.position or None, "last": last.isoformat()}
    if found.record.paused:
        body["paused"] = True
        if found.record.pause_reason is not None:
            body["pause_reason"] = found.record.pause_reason
    if found.suspended is not None:
        body["suspended"] = found.suspended.to_json()
    return body


def unreadable_json(found: Unreadable) -> Json:
    """A subscription that is not understood, as `SubscriptionBody` describes it."""
    body: Json = {
        "name": found.name,
        "realms_topics": [],
        "request_prefill": False,
        "prefill_queue_status": PrefillStatus.PENDING.value,
        "unreadable": found.reason,
    }
    return body if found.suspended is None else {**body, "suspended": found.suspended.to_json()}


def prefill_status(found: Registered) -> PrefillStatus:
    """How far its prefill is; one that was not asked for is done."""
    if found.prefill is not None:
        return found.prefill.status
    unfinished = found.record.definition.request_prefill or found.record.state is RecordState.REGISTERING
    return PrefillStatus.PENDING if unfinished else PrefillStatus.DONE


class PrefillReport(Given):
    """How far the prefill of a subscription is."""

    status: Literal["pending", "running", "failed", "done"] = Field(
        description="pending asks for another try of a prefill that failed"
    )
    reason: str | None = Field(default=None, max_length=2000, description="why it failed")


class StatusReport(Given):
    """What became of a message."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"status": "ok"},
                {"status": "retry", "delay": 30},
                {"status": "reject", "reason": "no such mailbox"},
                {"status": "extend", "lease_seconds": 60},
            ]
        }
    )

    status: Literal["ok", "retry", "reject", "extend"]
    delay: Seconds | None = Field(default=None, description="retry: not before so many seconds; default: the policy's")
    reason: str | None = Field(default=None, max_length=2000, description="reject: kept with the dead letter")
    lease_seconds: LeaseSeconds | None = Field(default=None, description="extend: for so long from now on")


class BulkReport(Given):
    """All messages that an instance has at hand, up to one, are handled."""

    status: Literal["ok"]
    up_to: Sequence


class LeaseRequest(Given):
    """Many messages at once."""

    max: Annotated[int, Field(ge=1, le=MOST_LEASED)] = 100
    lease_seconds: LeaseSeconds | None = Field(default=None, description="default: the subscription's")
    instance: str | None = Field(default=None, min_length=1, max_length=200, description="or X-Consumer-Instance")
    timeout: Wait = Field(default=0, description="wait so many seconds for the first message")


class BodyOfEvent(BaseModel):
    """The object as it was and as it is; not both empty."""

    old: dict[str, Any] = Field(default_factory=dict)
    new: dict[str, Any] = Field(default_factory=dict)


class EventBody(BaseModel):
    """An event to be published."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "publisher_name": "hr",
                    "ts": "2026-01-01T12:00:00Z",
                    "realm": "udm",
                    "topic": "users/user",
                    "body": {"old": {}, "new": {"uuid": "u-1", "name": "Ada"}},
                }
            ]
        }
    )

    publisher_name: str
    ts: datetime
    realm: str
    topic: str
    body: BodyOfEvent
    key: str | None = Field(default=None, description="which object; default: found in it")
    attributes: dict[str, str] | None = None
    id: str | None = Field(default=None, description="by which a repetition is known; or the header Idempotency-Key")


class MessageBody(EventBody):
    """A message as a consumer gets it."""

    sequence_number: int
    num_delivered: int


class LeasedMessage(MessageBody):
    """A message with its lease."""

    position: int | None = Field(description="the place of its event in the order of all events")
    lease_id: str
    lease_until: datetime
    traceparent: str | None = Field(default=None, description="the trace that its event belongs to, if it has one")
    tracestate: str | None = None


class LeasedMessages(BaseModel):
    """Messages of one lease, in their order."""

    messages: list[LeasedMessage]


class Extended(BaseModel):
    """A lease that goes on."""

    lease_until: datetime


class Acknowledged(BaseModel):
    """How many messages are handled now."""

    acknowledged: int


class Accepted(BaseModel):
    """An event is stored: at which position, under which id; a duplicate was stored before."""

    position: int
    id: str
    duplicate: bool


class AcceptedMany(BaseModel):
    """Events are stored, the last of them at this position."""

    position: int
    stored: int
    duplicates: int


class ReplayFilter(Given):
    """Only events of these topics."""

    realms_topics: list[TopicBody]


class ReplayRequest(Given):
    """Events of the past: from a position or a time on, up to another or to now."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"from": 1200, "to": 1300}]})

    from_: Annotated[Sequence | Time, Field(alias="from")]
    to: Sequence | Time | None = None
    filter: ReplayFilter | None = None

    def places(self) -> tuple[Place, Place | None]:
        """Where to begin and to end."""
        return self.from_, self.to

    def topics(self) -> tuple[RealmTopic, ...]:
        """The topics it is about; none: all."""
        return () if self.filter is None else read_topics(self.filter.model_dump(), "realms_topics")


class ReplayStarted(BaseModel):
    """A replay is on its way."""

    job: str
