"""The dialog that publishes an event. The functions of the HTTP API check and store it."""

import json
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from nicegui import ui

from purveyor.app.cli.parsers import parse_pair
from purveyor.app.console import html
from purveyor.app.console.form_values import Places, check_form, error_text
from purveyor.app.console.html import copy_button
from purveyor.app.console.page_base import ConsolePage, button, modal
from purveyor.app.http.events import publish_one
from purveyor.model import json_fields
from purveyor.model.errors import InvalidInput, PurveyorError
from purveyor.model.json_fields import Json
from purveyor.model.name_rules import is_exact
from purveyor.model.subscription import Subscription
from purveyor.sources.http_events import IncomingEvent

_FIELD: Final = "outlined dense"
_BODY: Final = '{\n  "old": {},\n  "new": {"id": "1"}\n}'
PUBLISHER: Final = "purveyor-console"
_PLACES: Final[Places] = (
    ("body", ("body",), {"new": {"id": "1"}}),
    ("attributes", ("attributes",), {}),
    ("key", ("key",), "1"),
    ("topic", ("topic",), "users/user"),
    ("realm", ("realm",), "udm"),
)


def read_event(values: Mapping[str, str], identity: str) -> tuple[Json, dict[str, str]]:
    """Return the event as a publisher sends it, and the fields that cannot be read."""
    errors: dict[str, str] = {}
    event: Json = {
        "publisher_name": PUBLISHER,
        "ts": datetime.now(UTC).isoformat(),
        "realm": values["realm"].strip(),
        "topic": values["topic"].strip(),
        "id": identity,
    }
    if values["key"].strip():
        event["key"] = values["key"].strip()
    for name, read in (("body", _read_body), ("attributes", _read_attributes)):
        try:
            found = read(values[name])
        except InvalidInput as error:
            errors[name] = error_text(error)
        else:
            event |= {name: found} if found or name == "body" else {}
    return event, errors


def _read_attributes(text: str) -> dict[str, str]:
    return dict(parse_pair(line.strip()) for line in text.splitlines() if line.strip())


def _read_body(text: str) -> Any:
    try:
        return json_fields.load(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"the body is not JSON: {error}", fix='write {"old": {}, "new": {...}}') from None


async def publish_event(page: ConsolePage, subscription: Subscription | None = None) -> None:
    """Show the form. It stays open after an event is stored, so that more can follow."""
    services = page.console.services
    wanted = subscription.realms_topics[0] if subscription is not None else None
    topic = wanted.topic if wanted is not None and is_exact(wanted.topic) else ""
    ids = [secrets.token_hex(8)]
    async with modal("Publish an event") as dialog:
        ui.label("Every subscription that matches gets it.").classes("soft")
        fields: dict[str, ui.input | ui.textarea] = {}
        with ui.element("div").classes("columns three"):
            fields["realm"] = ui.input("Realm", value=wanted.realm if wanted else "").props(f"{_FIELD} autofocus")
            fields["topic"] = ui.input("Topic", value=topic).props(_FIELD)
            fields["key"] = ui.input("Key").props(f'{_FIELD} hint="empty: a field of the object"')
        fields["body"] = ui.textarea("Body", value=_BODY).props(f"{_FIELD} autogrow spellcheck=false")
        fields["attributes"] = ui.textarea("Attributes").props(
            f'{_FIELD} autogrow spellcheck=false hint="NAME=VALUE, one on each line" input-style="min-height:1.6em"'
        )
        failure = ui.label().classes("form-error").props("role=alert")
        done = ui.html("", sanitize=False).classes("live").props("role=status")

        def show(errors: Mapping[str, str]) -> None:
            for name, shown in fields.items():
                shown.error = errors.get(name)
            failure.set_text(errors.get("", ""))

        async def publish() -> None:
            show({})
            done.set_content("")
            if not page.is_allowed():
                return
            given, errors = read_event({name: str(each.value or "") for name, each in fields.items()}, ids[0])
            validator = services.schema_cache.validator
            errors = errors or check_form(given, lambda event: IncomingEvent.read(event, validator), _PLACES)
            if errors:
                show(errors)
                return
            event = IncomingEvent.read(given, validator)
            try:
                stored = await publish_one(services, event, page.user)
            except PurveyorError as error:
                show({"": error_text(error)})
                return
            ids[0] = secrets.token_hex(8)  # until it is stored, a repetition has the same id
            done.set_content(_stored(stored, event))
            await page.refresh(fresh=True)

        with ui.element("div").classes("bar"):
            ui.element("span").classes("grow")
            button("Close", dialog.close)
            button("Publish", publish, kind="main")


def _stored(stored: Mapping[str, Any], event: IncomingEvent) -> str:
    position = str(stored["position"])
    copied = json.dumps(json.loads(event.data), ensure_ascii=False)
    buttons = (copy_button(position, "the position", "Copy position"), copy_button(copied, "the event", "Copy event"))
    return (
        f'<div class="form-done copyable apart"><span>Stored at position <strong>{html.cell(position)}</strong></span>'
        f"<span>{' '.join(each.text for each in buttons)}</span></div>"
    )
