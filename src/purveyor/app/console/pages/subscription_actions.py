"""The buttons of a subscription: pause, edit, publish, replay, delete and others; and a test event to its endpoints.

A test event passes no queue and reaches no other subscriber. The endpoint recognises it by its id, which begins with
`test-`, and by the attribute `purveyortest`.
"""

import contextlib
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
from purveyor.app.console.pages.publish_dialog import publish_event
from purveyor.app.console.pages.subscription_form import edit_subscription, set_password
from purveyor.app.subscription_input import PushInput
from purveyor.delivery.push.endpoint_pool import EndpointHealth, EndpointSender
from purveyor.delivery.push.http_pool import HttpPool
from purveyor.delivery.push.push_request import PushSecrets
from purveyor.delivery.push.settlement import Outcome
from purveyor.delivery.transitions import DeliveredMessage
from purveyor.model import json_fields
from purveyor.model.control_events import ReplayPoint
from purveyor.model.delivery_state import SubjectKind
from purveyor.model.errors import InvalidInput, PurveyorError
from purveyor.model.message_headers import EVENT_ID
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
            self._edit = button("Edit …", self._on_edit)
            self._password = button("New password …", self._on_password)
            self._publish = button("Publish an event …", self._on_publish, hint="With a topic of this subscription")
            self._replay = button("Replay …", self._on_replay, hint=HINTS["replay"])
            self._prefill = button("Prefill again", self._on_prefill, kind="main", hint=HINTS["prefill"])
            ui.element("span").classes("grow")
            self._delete = button("Delete …", self._on_delete, kind="plain danger")

    def update(self, found: Registered | Unreadable | None) -> None:
        """Set the current state. A subscription with an unreadable record can only be deleted."""
        self._bar.set_visibility(found is not None)
        self._unreadable = isinstance(found, Unreadable)
        edits = (self._edit, self._password, self._publish)
        for each in (self._pause, self._resume, self._test, self._replay, self._prefill, *edits):
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

    async def _on_edit(self) -> None:
        if self._definition is not None:
            await edit_subscription(self._page, self._definition)

    async def _on_password(self) -> None:
        await set_password(self._page, self._name)

    async def _on_publish(self) -> None:
        await publish_event(self._page, self._definition)

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
