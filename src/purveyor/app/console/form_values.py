"""The values of the subscription form: from a definition to texts, and from texts to the body of an HTTP request.

The form sends what a client of the HTTP API would send, and the models of the API check it. `check_form` finds the
field that an error belongs to: the one whose replacement makes the error go away. Pure, except for the encryption of
secrets.
"""

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from purveyor.app.cli.parsers import parse_duration, parse_pair, parse_scalar, parse_topic
from purveyor.app.http.models import NewSubscription, SubscriptionChange
from purveyor.app.subscription_input import PushInput
from purveyor.delivery.push.push_request import generate_secret
from purveyor.model.delivery_policy import (
    DEFAULT_ACK_DEADLINE_SECONDS,
    DEFAULT_HIDDEN_FIELDS,
    DEFAULT_LEASE_SECONDS,
    RetryPolicy,
)
from purveyor.model.errors import InvalidInput, PurveyorError, SchemaMismatch
from purveyor.model.json_fields import Json
from purveyor.model.subscription import RealmTopic, Scalar, Subscription
from purveyor.model.subscription_limits import check_options, check_subscription, check_topics
from purveyor.queues.catalogue import subscription_queue

T = TypeVar("T")
KEEP: Final = "keep"
GENERATE: Final = "generate"
GIVEN: Final = "given"
NONE: Final = "none"
DEFAULT: Final = "default"
_UNITS: Final = ((86400.0, "d"), (3600.0, "h"), (60.0, "m"), (1.0, "s"), (0.001, "ms"))
_SEVERAL: Final = re.compile(r",\s+[^\s,:]+:")
"""Looks like another topic behind a comma."""
_GOOD_URL: Final = "https://example.com/"
_GOOD_TOPIC: Final = {"realm": "udm", "topic": "users/user"}

Places = Sequence[tuple[str, tuple[str, ...], Any]]
"""The fields of a form, their places in the body, and values that are always right."""
_PLACES: Final[Places] = (
    ("name", ("name",), "x"),
    ("topics", ("realms_topics",), [_GOOD_TOPIC]),
    ("order", ("order_by",), None),
    ("lease", ("lease_seconds",), None),
    ("max_attempts", ("retry", "max_attempts"), None),
    ("min_backoff", ("retry", "min_backoff_seconds"), 0.0),
    ("max_backoff", ("retry",), None),
    ("retention", ("retention_seconds",), None),
    ("attributes", ("filter", "attributes"), {}),
    ("fields", ("filter", "fields"), {}),
    ("hidden_fields", ("hidden_fields",), None),
    ("ack_deadline", ("push", "ack_deadline_seconds"), None),
    ("after_dead_letter", ("push", "after_dead_letter"), None),
    ("secret", ("push", "secret"), None),
    ("bearer_token", ("push", "bearer_token"), None),
    ("endpoints", ("push", "endpoints"), [_GOOD_URL]),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormValues:
    """The contents of the fields of the form."""

    name: str = ""
    topics: str = ""
    prefill: bool = False
    prefill_new_topics: bool = False
    """Of a change of topics: whether the state of the objects of new topics comes first."""
    delivery: str = "ordered"
    order: str = ""
    endpoints: str = ""
    format: str = "pubsub"
    ack_codes: str = "pubsub"
    ack_deadline: str = ""
    after_dead_letter: str = "continue"
    signing: str = GENERATE
    secret: str = field(default="", repr=False)
    bearer: str = NONE
    bearer_token: str = field(default="", repr=False)
    lease: str = ""
    max_attempts: str = ""
    min_backoff: str = ""
    max_backoff: str = ""
    retention: str = ""
    attributes: str = ""
    fields: str = ""
    hiding: str = DEFAULT
    hidden_fields: str = ""

    @classmethod
    def of(cls, definition: Subscription) -> "FormValues":
        """Return the values of an existing subscription. Secrets are not shown: they stay unless others are given."""
        push, retry = definition.push, definition.retry
        hidden = definition.hidden_fields
        return cls(
            name=definition.name,
            topics="\n".join(f"{each.realm}:{each.topic}" for each in definition.realms_topics),
            prefill=definition.request_prefill,
            delivery=definition.delivery.value,
            order="" if definition.order_by is None else definition.order_by.value,
            endpoints="" if push is None else "\n".join(push.endpoints),
            format="pubsub" if push is None else push.format.value,
            ack_codes="pubsub" if push is None else push.ack_codes.value,
            ack_deadline="" if push is None else duration_text(push.ack_deadline_seconds),
            after_dead_letter="continue" if push is None else push.after_dead_letter.value,
            signing=GENERATE if push is None else KEEP,
            bearer=NONE if push is None else KEEP,
            lease=duration_text(definition.lease_seconds),
            max_attempts="" if retry.max_attempts is None else str(retry.max_attempts),
            min_backoff=duration_text(retry.min_backoff_seconds),
            max_backoff=duration_text(retry.max_backoff_seconds),
            retention="" if definition.retention_seconds is None else duration_text(definition.retention_seconds),
            attributes=_pair_lines(definition.filter.attributes, str),
            fields=_pair_lines(definition.filter.fields, _scalar_text),
            hiding=DEFAULT if hidden == DEFAULT_HIDDEN_FIELDS else GIVEN if hidden else NONE,
            hidden_fields="" if hidden == DEFAULT_HIDDEN_FIELDS else "\n".join(hidden),
        )


@dataclass(frozen=True, slots=True)
class FormResult:
    """The request of a form, or what is wrong with its fields; the field "" is the form as a whole."""

    errors: Mapping[str, str]
    body: Json = field(default_factory=dict, repr=False)
    secret: str | None = field(default=None, repr=False)
    """The generated secret, to be shown once."""


def read_new(values: FormValues, password: str, push_input: PushInput) -> FormResult:
    """Return the body of `POST /v1/subscriptions`, or the errors."""
    reader = _Reader(values)
    body, secret = reader.body(is_new=True)
    body = {"password": password, **body}

    def check(given: Json) -> None:
        definition = NewSubscription.model_validate(given).definition(push_input)
        subscription_queue(definition.name)
        check_subscription(definition)

    return FormResult(reader.merge(check_form(body, check)), body, secret)


def read_change(values: FormValues, current: Subscription, push_input: PushInput) -> FormResult:
    """Return the body of `PATCH /v1/subscriptions/{name}` with the fields that the form changes, or the errors."""
    before, _ = _Reader(FormValues.of(current)).body(is_new=False)
    reader = _Reader(values)
    after, secret = reader.body(is_new=False)
    body = _differences(before, after)
    if "push" in body and "push" in before:
        body["push"] = _differences(before["push"], body["push"])
    if "realms_topics" in body and values.prefill_new_topics:
        body["prefill_new_topics"] = True

    def check(given: Json) -> None:
        change = SubscriptionChange.model_validate(given)
        definition = change.apply_to(current, push_input)
        check_topics(definition.realms_topics)
        check_options(definition)

    endpoints = None if current.push is None else list(current.push.endpoints)
    places = [(name, place, endpoints or good if name == "endpoints" else good) for name, place, good in _PLACES]
    return FormResult(reader.merge(check_form(body, check, places)), body, secret)


def _differences(before: Json, after: Json) -> Json:
    """Return the fields that are new or have another value. A secret that is to be removed is new, and null."""
    return {name: value for name, value in after.items() if name not in before or value != before[name]}


def check_form(body: Json, check: Callable[[Json], object], places: Places = _PLACES) -> dict[str, str]:
    """Check a body, and return each error with the field that it belongs to."""
    errors: dict[str, str] = {}
    while (error := _find_error(body, check)) is not None:
        for name, place, good in places:
            cured = _replace(body, place, good) if name not in errors else None
            if cured is not None and _find_error(cured, check) != error:
                errors[name], body = error[0], cured
                break
        else:
            return errors or {"": error[0]}
    return errors


def _find_error(body: Json, check: Callable[[Json], object]) -> tuple[str, object] | None:
    """Return the first error of a body, with the place that pydantic names; None if it is right."""
    try:
        check(body)
    except ValidationError as error:
        first = error.errors()[0]
        return str(first["msg"]).removeprefix("Value error, "), first["loc"]
    except PurveyorError as error:
        return error_text(error), None
    return None


def error_text(error: PurveyorError) -> str:
    """Return an error with its fix in one line; of a schema, only what is wrong where."""
    if isinstance(error, SchemaMismatch) and error.mistakes:
        return "; ".join(f"{where}: {what}" for where, what in error.mistakes)
    return error.message if error.fix is None else f"{error.message}: {error.fix}"


def _replace(body: Json, place: Sequence[str], value: Any) -> Json | None:
    """Return the body with another value at a place; None if there is nothing at this place."""
    changed = copy.deepcopy(body)
    inner: Any = changed
    for name in place[:-1]:
        inner = inner.get(name) if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or inner.get(place[-1]) is None or inner[place[-1]] == value:
        return None
    inner[place[-1]] = value
    return changed


class _Reader:
    """Reads the fields of a form. It keeps the errors by field."""

    def __init__(self, values: FormValues) -> None:
        self._values = values
        self.errors: dict[str, str] = {}

    def merge(self, found: Mapping[str, str]) -> dict[str, str]:
        """Return these errors with those of fields that cannot be read. The body has the defaults of such fields."""
        known = {name: text for name, text in found.items() if name or not self.errors}
        return {**known, **self.errors}

    def body(self, *, is_new: bool) -> tuple[Json, str | None]:
        """Return the body, and the secret if one is generated."""
        values = self._values
        no_topics: list[Json] = []
        body: Json = {
            "realms_topics": self._read("topics", _read_topics, no_topics),
            "delivery": values.delivery,
            "order_by": values.order or None,
            "lease_seconds": self._seconds("lease", DEFAULT_LEASE_SECONDS),
            "retry": self._retry(),
            "retention_seconds": self._seconds("retention", None),
            "filter": self._filter(),
            "hidden_fields": self._hidden(),
        }
        if is_new:
            body |= {"name": values.name.strip(), "request_prefill": values.prefill}
            body = {name: value for name, value in body.items() if value is not None}
        secret = None
        if values.delivery == "push":
            body["push"], secret = self._push(is_new=is_new)
        return body, secret

    def _push(self, *, is_new: bool) -> tuple[Json, str | None]:
        values = self._values
        push: Json = {
            "endpoints": _lines(values.endpoints),
            "format": values.format,
            "ack_codes": values.ack_codes,
            "ack_deadline_seconds": self._seconds("ack_deadline", DEFAULT_ACK_DEADLINE_SECONDS),
            "after_dead_letter": values.after_dead_letter,
        }
        if not push["endpoints"]:
            self.errors["endpoints"] = "push needs an endpoint: write a URL such as https://shop.example/events"
        secret = generate_secret() if values.signing == GENERATE else None
        if values.signing != KEEP:
            given = self._given("secret", values.secret) if values.signing == GIVEN else secret
            push["secret"] = given
        if values.bearer != KEEP:
            push["bearer_token"] = self._given("bearer_token", values.bearer_token) if values.bearer == GIVEN else None
        return ({name: value for name, value in push.items() if value is not None} if is_new else push), secret

    def _given(self, name: str, text: str) -> str:
        if not text.strip():
            self.errors[name] = "it is empty: write it, or choose another way above"
        return text.strip()

    def _retry(self) -> Json:
        default = RetryPolicy()
        return {
            "max_attempts": self._read("max_attempts", _read_whole, None),
            "min_backoff_seconds": self._seconds("min_backoff", default.min_backoff_seconds),
            "max_backoff_seconds": self._seconds("max_backoff", default.max_backoff_seconds),
        }

    def _filter(self) -> Json | None:
        nothing: dict[str, list[Scalar]] = {}
        found = {
            "attributes": self._read("attributes", lambda text: _read_pairs(text, str), nothing),
            "fields": self._read("fields", lambda text: _read_pairs(text, parse_scalar), nothing),
        }
        return found if any(found.values()) else None

    def _hidden(self) -> list[str] | None:
        if self._values.hiding == DEFAULT:
            return None
        found = _lines(self._values.hidden_fields) if self._values.hiding == GIVEN else []
        if self._values.hiding == GIVEN and not found:
            self.errors["hidden_fields"] = "no field is named: write one on each line, or choose to hide none"
        return found

    def _seconds(self, name: str, default: float | None) -> float | None:
        def read(text: str) -> float | None:
            return parse_duration(text).total_seconds() if text.strip() else default

        return self._read(name, read, default)

    def _read(self, name: str, read: Callable[[str], T], default: T) -> T:
        try:
            return read(str(getattr(self._values, name)))
        except PurveyorError as error:
            self.errors[name] = error_text(error)
            return default


def _read_topics(text: str) -> list[Json]:
    r"""Read topics, one on each line. A comma is a part of the topic.

    >>> _read_topics("udm:users/user\nshop:orders/.{1,3}")
    [{'realm': 'udm', 'topic': 'users/user'}, {'realm': 'shop', 'topic': 'orders/.{1,3}'}]
    """
    lines = _lines(text)
    if not lines:
        raise InvalidInput("a subscription needs a topic", fix="write realm:topic, such as udm:users/user")
    found: list[RealmTopic] = []
    for line in lines:
        if _SEVERAL.search(line):
            raise InvalidInput(f"{line!r} looks like several topics", fix="write each on a line of its own")
        found.append(parse_topic(line))
    return [each.to_json() for each in dict.fromkeys(found)]


def _read_whole(text: str) -> int | None:
    clean = text.strip()
    if not clean:
        return None
    if not (clean.isascii() and clean.isdecimal() and len(clean) <= 9):
        raise InvalidInput(f"{text!r} is not a number", fix="write 1 or more, or nothing for no limit")
    return int(clean)


def _read_pairs(text: str, read: Callable[[str], Scalar]) -> dict[str, list[Scalar]]:
    """Read NAME=VALUE, one on each line; the same name again adds a value."""
    found: dict[str, list[Scalar]] = {}
    for line in _lines(text):
        name, value = parse_pair(line)
        found.setdefault(name.strip(), []).append(read(value.strip()))
    return found


def _pair_lines(wanted: Mapping[str, Sequence[Scalar]], write: Callable[[Scalar], str]) -> str:
    """Return NAME=VALUE on each line, so that reading it gives the same values."""
    return "\n".join(f"{name}={write(value)}" for name, values in wanted.items() for value in values)


def _scalar_text(value: Scalar) -> str:
    if isinstance(value, str) and value == value.strip() and "\n" not in value and parse_scalar(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def duration_text(seconds: float) -> str:
    """Format a duration so that `parse_duration` reads it: in the largest unit that gives a whole number.

    >>> [duration_text(each) for each in (0, 0.05, 30, 90, 3600, 604800)]
    ['0', '50ms', '30s', '90s', '1h', '7d']
    """
    if not seconds:
        return "0"
    for size, unit in _UNITS:
        count = seconds / size
        if round(count, 6) == int(count) and count >= 1:
            return f"{int(count)}{unit}"
    return f"{seconds:.6f}".rstrip("0").rstrip(".") + "s"


def allowed_orders(delivery: str) -> dict[str, str]:
    """Return the orders that a delivery mode can keep, with their descriptions."""
    every = {"": "None", "key": "By key: the messages of one object", "position": "By position: strictly one by one"}
    names = {"ordered": ("position",), "parallel": ("", "key")}.get(delivery, ("", "key", "position"))
    return {name: every[name] for name in names}
