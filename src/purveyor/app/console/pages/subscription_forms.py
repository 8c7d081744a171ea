"""Forms of subscriptions: add one that fetches or a webhook, and send a webhook a test event."""

import secrets
from dataclasses import dataclass
from typing import Final

from nicegui import ui

from purveyor.app.console import html
from purveyor.app.console.alerts import Level
from purveyor.app.console.html import Head
from purveyor.app.console.page_base import Page, button, complain, sheet
from purveyor.app.console.webhook_test import Tested, send_test
from purveyor.delivery.push.signing import new_secret
from purveyor.model.errors import InvalidInput, InvalidName, PurveyorError
from purveyor.model.json_fields import Json
from purveyor.model.push_config import PushFormat
from purveyor.model.subscription import Subscription

_WAYS: Final = {
    "ordered": "Fetched, one at a time, in order",
    "parallel": "Fetched by many at once",
    "push": "Webhook: sent to an endpoint",
}


@dataclass(frozen=True, slots=True)
class Made:
    """What a new subscription needs to be told, and is not shown again."""

    name: str
    password: str
    secret: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What was filled in."""

    name: str
    topics: str
    way: str
    prefill: bool
    endpoint: str
    format: str
    sign: bool

    def definition(self) -> Json:
        """As the API takes it, without what is about push."""
        return {
            "name": self.name,
            "realms_topics": topics(self.topics),
            "request_prefill": self.prefill,
            "delivery": self.way,
        }


async def add_subscription(page: Page) -> None:
    """Ask for it, add it, and show its password this once."""
    made: list[Made] = []
    async with sheet("Add a subscription") as dialog:
        name = ui.input("Name").props("outlined dense autofocus")
        wanted = ui.input("Topics", value="udm:users/user").props(
            'outlined dense hint="realm:topic, several by commas; a topic may be a regular expression"'
        )
        way = ui.select(_WAYS, label="Delivery", value="ordered").props("outlined dense")
        with ui.element("div").classes("sheet-part") as webhook:
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
                complain(error)
                return
            dialog.close()

        with ui.element("div").classes("bar"):
            ui.element("span").classes("grow")
            button("Cancel", dialog.close)
            button("Add", add, kind="main")
    if made:
        await page.refresh(anew=True)
        await _show_made(made[0])
        ui.navigate.to(f"/console/subscriptions/{made[0].name}")


async def _add(page: Page, form: Form) -> Made:
    console, services = page.console, page.console.services
    secret = new_secret() if form.way == "push" and form.sign else None
    given = form.definition()
    if form.way == "push":
        settings: Json = {"endpoint": form.endpoint, "format": form.format}
        pushed = console.push.added(settings | ({"secret": secret} if secret else {}))
        given["push"] = pushed.to_json()
    definition = Subscription.from_json(given)
    if console.security.is_reserved(definition.name):
        raise InvalidName(f"the name {definition.name!r} is that of a login", fix="choose another name")
    record, created = await services.subscriptions.add(definition)
    if not created:
        raise InvalidInput(f"subscription {definition.name!r} is there already", fix="choose another name")
    password = secrets.token_urlsafe(18)
    await services.credentials.set_first(definition.name, record.incarnation, password)
    services.pull.forget(definition.name)
    return Made(definition.name, password, secret)


async def _show_made(made: Made) -> None:
    async with sheet(f"{made.name} is added") as dialog:
        rows: list[tuple[str, html.Cell]] = [("Password", _code(made.password))]
        if made.secret is not None:
            rows.append(("Secret to check signatures with", _code(made.secret)))
        ui.label("Shown this once. Give it to the consumer.").classes("soft")
        ui.html(html.pairs(rows), sanitize=False)
        with ui.element("div").classes("bar"):
            ui.element("span").classes("grow")
            button("I have it", dialog.close, kind="main").props("autofocus")


async def test_webhook(page: Page, definition: Subscription) -> None:
    """Send a test event to each endpoint, and show what came back."""
    try:
        found = await send_test(definition, page.console.push)
    except PurveyorError as error:
        complain(error)
        return
    async with sheet(f"Test event to {definition.name}") as dialog:
        ui.html(_answers(found), sanitize=False)
        with ui.element("div").classes("bar"):
            ui.element("span").classes("grow")
            button("Close", dialog.close).props("autofocus")


def _answers(found: list[Tested]) -> str:
    heads = (Head("Endpoint"), Head("Result"), Head("Time", numeric=True), Head("Answer"))
    rows = [
        (
            each.url,
            html.badge(each.outcome.words, Level.FINE if each.accepted else Level.STUCK),
            f"{each.milliseconds:.0f} ms",
            each.outcome.excerpt or None,
        )
        for each in found
    ]
    return html.table(heads, rows, label="Answers")


def _code(text: str) -> html.Markup:
    return html.Markup(f"<code>{html.cell(text)}</code>")


def topics(text: str) -> list[Json]:
    """Topics as somebody types them.

    >>> topics("udm:users/user, shop:orders/.*")
    [{'realm': 'udm', 'topic': 'users/user'}, {'realm': 'shop', 'topic': 'orders/.*'}]
    """
    found: list[Json] = []
    for each in filter(None, (part.strip() for part in text.split(","))):
        realm, colon, topic = each.partition(":")
        if not colon or not realm or not topic:
            raise InvalidInput(f"{each!r} is no topic", fix="write realm:topic, udm:users/user say")
        found.append({"realm": realm, "topic": topic})
    return found
