"""Actions on subscriptions: add, pause, resume, replay, prefill again, delete, and send a test event to a webhook.

A test event passes no queue and reaches no other subscriber. The endpoint recognises it by its id, which begins with
`test-`, and by the attribute `purveyortest`.
"""

import contextlib
import secrets
import time
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from nicegui import ui

from purveyor.app.console import html
from purveyor.app.console.alerts import Level
from purveyor.app.console.formatting import HINTS
from purveyor.app.console.html import TableColumn
from purveyor.app.console.page_base import ConsolePage, button, confirm, modal, notify_error
from purveyor.app.push_input import PushInput
from purveyor.delivery.push.endpoint_pool import EndpointHealth, EndpointSender
from purveyor.delivery.push.http_pool import HttpPool
from purveyor.delivery.push.push_request import PushSecrets, generate_secret
from purveyor.delivery.push.settlement import Outcome
from purveyor.delivery.transitions import DeliveredMessage
from purveyor.jetstream.headers import EVENT_ID
from purveyor.model import json_fields
from purveyor.model.control_events import ReplayPoint
from purveyor.model.delivery_policy import PushFormat
from purveyor.model.delivery_state import SubjectKind
from purveyor.model.errors import InvalidInput, InvalidName, PurveyorError
from purveyor.model.json_fields import Json
from purveyor.model.registration import PrefillStatus
from purveyor.model.subscription import Subscription
from purveyor.queues.registry import Registered, Unreadable

_LIST: Final = "/console/subscriptions"


@dataclass(frozen=True, slots=True)
class EndpointAnswer:
    """The answer of an endpoint to a test event."""

    url: str
    outcome: Outcome
    milliseconds: float
    accepted: bool


async def send_test(definition: Subscription, push_input: PushInput) -> list[EndpointAnswer]:
    """Send a test event to each endpoint. Raise InvalidInput if there is none, or a secret is not available."""
    push = definition.push
    if push is None:
        raise InvalidInput(f"subscription {definition.name!r} is not pushed", fix="give it an endpoint first")
    has_secrets = push.secret is not None or push.bearer_token is not None
    secrets = PushSecrets.decrypt(push, push_input.cipher()) if has_secrets else PushSecrets()
    message = _build_test_event(definition)
    found = []
    with contextlib.closing(HttpPool(push_input.allowed)) as http:
        for endpoint in push.targets:
            host = http.host(endpoint)
            sender = EndpointSender(endpoint, EndpointHealth(), host)
            sender.configure(definition.name, push, secrets)
            began = time.perf_counter()
            outcome = await host.post(sender.build_request(message), push.ack_deadline_seconds)
            accepted = outcome.status is not None and push.ack_codes.acknowledges(outcome.status)
            found.append(EndpointAnswer(endpoint.url, outcome, (time.perf_counter() - began) * 1000, accepted))
    return found


def _build_test_event(definition: Subscription) -> DeliveredMessage:
    wanted = definition.realms_topics[0]
    event = {
        "publisher_name": "purveyor-console",
        "ts": datetime.now(UTC).isoformat(),
        "realm": wanted.realm,
        "topic": wanted.topic,
        "body": {"old": {}, "new": {"id": "test", "text": "A test event from the console"}},
        "attributes": {"purveyortest": "true"},
    }
    return DeliveredMessage(
        sequence=0,
        position=None,
        kind=SubjectKind.MAIN,
        data=json_fields.dump(event),
        headers={EVENT_ID: (f"test-{uuid.uuid4()}",)},
        num_delivered=1,
        lease=None,
        until=None,
    )


class Actions:
    """The buttons of a subscription. It hides those that do not apply now."""

    def __init__(self, page: ConsolePage, name: str) -> None:
        self._page, self._name = page, name
        self._definition: Subscription | None = None
        self._unreadable = False
        with ui.element("div").classes("bar") as self._bar:
            self._pause = button("Pause", self._on_pause, hint="Deliver nothing until you resume it; the queue grows")
            self._resume = button(
                "Resume", self._on_resume, kind="main", hint="Deliver again, and write the missed events"
            )
            self._test = button("Send a test event", self._on_test, hint="To its endpoint only, without any queue")
            self._replay = button("Replay …", self._on_replay, hint=HINTS["replay"])
            self._prefill = button("Prefill again", self._on_prefill, kind="main", hint=HINTS["prefill"])
            ui.element("span").classes("grow")
            self._delete = button("Delete …", self._on_delete, kind="plain danger")

    def update(self, found: Registered | Unreadable | None) -> None:
        """Set the current state. A subscription with an unreadable record can only be deleted."""
        self._bar.set_visibility(found is not None)
        self._unreadable = isinstance(found, Unreadable)
        for each in (self._pause, self._resume, self._test, self._replay, self._prefill):
            each.set_visibility(not self._unreadable)
        if found is None or isinstance(found, Unreadable):
            return
        halted = found.record.paused or found.suspended is not None
        self._definition = found.record.definition
        self._test.set_visibility(found.record.definition.push is not None)
        self._pause.set_visibility(not found.record.paused)
        self._resume.set_visibility(halted)
        self._prefill.set_visibility(found.prefill is not None and found.prefill.status is PrefillStatus.FAILED)

    async def _on_test(self) -> None:
        if self._definition is not None:
            await show_webhook_test(self._page, self._definition)

    async def _on_pause(self) -> None:
        services = self._page.console.services
        await self._page.run_action(lambda: services.subscriptions.pause(self._name), f"{self._name} is paused")
        services.registrations.invalidate(self._name)

    async def _on_resume(self) -> None:
        services = self._page.console.services
        await self._page.run_action(lambda: services.subscriptions.resume(self._name), f"{self._name} is resumed")
        services.registrations.invalidate(self._name)

    async def _on_prefill(self) -> None:
        work = self._page.console.services.subscriptions.request_prefill
        await self._page.run_action(lambda: work(self._name), f"The prefill of {self._name} is requested again")

    async def _on_replay(self) -> None:
        async with modal(f"Replay to {self._name}") as dialog:
            ui.label("Matching past events are written to its queue again, after the waiting messages.").classes("soft")
            begin = ui.input("From", placeholder="a position, or 2026-01-31T12:00:00Z").props(
                "outlined dense autofocus"
            )
            end = ui.input("To (empty: up to now)", placeholder="a position or a time").props("outlined dense")

            async def start() -> None:
                async def work() -> None:
                    first = parse_position(str(begin.value or ""))
                    if first is None:
                        raise InvalidInput("the start is missing", fix="give a position or a time")
                    await self._page.console.services.subscriptions.replay(
                        self._name, first, parse_position(str(end.value or ""))
                    )

                if await self._page.run_action(work, f"The replay to {self._name} is requested"):
                    dialog.close()

            with ui.element("div").classes("bar"):
                ui.element("span").classes("grow")
                button("Cancel", dialog.close)
                button("Replay", start, kind="main")

    async def _on_delete(self) -> None:
        text = "All messages in its queue are deleted, and its consumer can no longer log in. This cannot be undone."
        if self._unreadable:
            text += " This version cannot read its record; a newer version could serve it."
        if not await confirm(f"Delete {self._name}?", text, yes="Delete"):
            return

        async def work() -> None:
            services = self._page.console.services
            incarnation = await services.subscriptions.delete(self._name, force=self._unreadable)
            services.registrations.invalidate(self._name)
            await services.credentials.remove(self._name, incarnation)

        if await self._page.run_action(work, f"{self._name} is deleted"):
            ui.navigate.to(_LIST)


def parse_position(text: str) -> ReplayPoint | None:
    """Parse a position or a time; None for an empty text.

    >>> parse_position("12"), parse_position(" "), parse_position("2026-01-31T12:00")
    (12, None, datetime.datetime(2026, 1, 31, 12, 0, tzinfo=datetime.timezone.utc))
    """
    given = text.strip()
    if not given:
        return None
    if given.isdecimal():
        return int(given)
    try:
        found = datetime.fromisoformat(given)
    except ValueError:
        raise InvalidInput(
            f"{given!r} is neither a position nor a time", fix="write 1200 or 2026-01-31T12:00:00Z"
        ) from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


_DELIVERY_MODES: Final = {
    "ordered": "Fetched, one at a time, in order",
    "parallel": "Fetched by many at once",
    "push": "Webhook: sent to an endpoint",
}


@dataclass(frozen=True, slots=True)
class NewLogin:
    """The credentials of a new subscription, which the console shows only once."""

    name: str
    password: str
    secret: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The content of the form."""

    name: str
    topics: str
    way: str
    prefill: bool
    endpoint: str
    format: str
    sign: bool

    def definition(self) -> Json:
        """Return the definition without its push settings."""
        return {
            "name": self.name,
            "realms_topics": parse_topics(self.topics),
            "request_prefill": self.prefill,
            "delivery": self.way,
        }


async def add_subscription(page: ConsolePage) -> None:
    """Show the form, add the subscription, and show its password once."""
    made: list[NewLogin] = []
    async with modal("Add a subscription") as dialog:
        name = ui.input("Name").props("outlined dense autofocus")
        wanted = ui.input("Topics", value="udm:users/user").props(
            'outlined dense hint="realm:topic, several by commas; a topic may be a regular expression"'
        )
        way = ui.select(_DELIVERY_MODES, label="Delivery", value="ordered").props("outlined dense")
        with ui.element("div").classes("modal-part") as webhook:
            endpoint = ui.input("Endpoint", placeholder="https://shop.example/in").props("outlined dense")
            formats = [each.value for each in PushFormat]
            form = ui.select(formats, label="Format", value=PushFormat.PUBSUB.value).props("outlined dense")
            sign = ui.checkbox("Sign messages (the secret is shown once)", value=True)
        webhook.bind_visibility_from(way, "value", value="push")
        prefill = ui.checkbox("Prefill: deliver the current state of all objects first")

        def filled_in() -> Form:
            return Form(
                name=str(name.value or "").strip(),
                topics=str(wanted.value or ""),
                way=str(way.value),
                prefill=bool(prefill.value),
                endpoint=str(endpoint.value or "").strip(),
                format=str(form.value),
                sign=bool(sign.value),
            )

        async def add() -> None:
            try:
                made.append(await _add(page, filled_in()))
            except PurveyorError as error:
                notify_error(error)
                return
            dialog.close()

        with ui.element("div").classes("bar"):
            ui.element("span").classes("grow")
            button("Cancel", dialog.close)
            button("Add", add, kind="main")
    if made:
        await page.refresh(fresh=True)
        await _show_made(made[0])
        ui.navigate.to(f"/console/subscriptions/{made[0].name}")


async def _add(page: ConsolePage, form: Form) -> NewLogin:
    console, services = page.console, page.console.services
    secret = generate_secret() if form.way == "push" and form.sign else None
    given = form.definition()
    if form.way == "push":
        settings: Json = {"endpoint": form.endpoint, "format": form.format}
        pushed = console.push.parse_new(settings | ({"secret": secret} if secret else {}))
        given["push"] = pushed.to_json()
    definition = Subscription.from_json(given)
    if console.authenticator.is_reserved(definition.name):
        raise InvalidName(f"a login of the settings has the name {definition.name!r}", fix="choose another name")
    record, created = await services.subscriptions.add(definition)
    if not created:
        raise InvalidInput(f"subscription {definition.name!r} already exists", fix="choose another name")
    password = secrets.token_urlsafe(18)
    await services.credentials.set_first_password(definition.name, record.incarnation, password)
    services.registrations.invalidate(definition.name)
    return NewLogin(definition.name, password, secret)


async def _show_made(made: NewLogin) -> None:
    async with modal(f"{made.name} is added") as dialog:
        rows: list[tuple[str, html.Cell]] = [("Password", _code(made.password))]
        if made.secret is not None:
            rows.append(("Secret to check signatures with", _code(made.secret)))
        ui.label("Shown only once. Give it to the consumer.").classes("soft")
        ui.html(html.pairs(rows), sanitize=False)
        with ui.element("div").classes("bar"):
            ui.element("span").classes("grow")
            button("I have it", dialog.close, kind="main").props("autofocus")


async def show_webhook_test(page: ConsolePage, definition: Subscription) -> None:
    """Send a test event to each endpoint, and show the answers."""
    try:
        found = await send_test(definition, page.console.push)
    except PurveyorError as error:
        notify_error(error)
        return
    async with modal(f"Test event to {definition.name}") as dialog:
        ui.html(_answers(found), sanitize=False)
        with ui.element("div").classes("bar"):
            ui.element("span").classes("grow")
            button("Close", dialog.close).props("autofocus")


def _answers(found: list[EndpointAnswer]) -> str:
    heads = (TableColumn("Endpoint"), TableColumn("Result"), TableColumn("Time", numeric=True), TableColumn("Answer"))
    rows = [
        (
            each.url,
            html.badge(each.outcome.summary, Level.FINE if each.accepted else Level.STUCK),
            f"{each.milliseconds:.0f} ms",
            each.outcome.excerpt or None,
        )
        for each in found
    ]
    return html.table(heads, rows, label="Answers")


def _code(text: str) -> html.Markup:
    return html.Markup(f"<code>{html.cell(text)}</code>")


def parse_topics(text: str) -> list[Json]:
    """Parse topics.

    >>> parse_topics("udm:users/user, shop:orders/.*")
    [{'realm': 'udm', 'topic': 'users/user'}, {'realm': 'shop', 'topic': 'orders/.*'}]
    """
    found: list[Json] = []
    for each in filter(None, (part.strip() for part in text.split(","))):
        realm, colon, topic = each.partition(":")
        if not colon or not realm or not topic:
            raise InvalidInput(f"{each!r} is not a topic", fix="write realm:topic, for example udm:users/user")
        found.append({"realm": realm, "topic": topic})
    return found
