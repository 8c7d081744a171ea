"""How to use a subscription: its name, its URL and a curl line, each with a copy button. Pure."""

from urllib.parse import quote

from purveyor.app.console import html
from purveyor.app.console.html import copyable, copyable_code
from purveyor.model.delivery_policy import Delivery
from purveyor.model.subscription import Subscription


def use_lines(definition: Subscription, base: str) -> str:
    """Return the name, the URL and a curl line. `base` is the address of the API, as the browser sees it."""
    name, url = definition.name, f"{base.rstrip('/')}/v1/subscriptions/{quote(definition.name)}"
    if definition.delivery is Delivery.PUSH:
        curl, what = f"curl -u {name}:PASSWORD '{url}/attempts?outcome=failed'", "Its failed attempts"
    else:
        curl, what = f"curl -u {name}:PASSWORD '{url}/messages/next?timeout=5'", "Its next message"
    rows = [
        ("Name", copyable(name, name, "the name")),
        ("URL", copyable_code(url, "the URL")),
        (what, copyable_code(curl, "the curl line")),
    ]
    return f'<div class="lines">{html.pairs(rows)}</div>'
