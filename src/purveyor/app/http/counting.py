"""Counts the answers of the API by route, method and status, for Prometheus. Plain ASGI: every request pays it."""

from typing import Final

from starlette.types import Message, Scope, Send

from purveyor.model.figures import HTTP_REQUESTS

ROUTE: Final = "purveyor.route"
"""Where in the scope of a request its route is found, if no framework has looked for it."""


def counted(scope: Scope, send: Send) -> Send:
    """Pass an answer on, and count it by its route, method and status."""

    async def passed(message: Message) -> None:
        if message["type"] == "http.response.start":
            HTTP_REQUESTS.add(_route(scope), scope["method"], str(message["status"]))
        await send(message)

    return passed


def _route(scope: Scope) -> str:
    """The route as it is documented: with the names of subscriptions there would be one for each of them."""
    path = getattr(scope.get("route"), "path", None)
    return str(path or scope.get(ROUTE) or "other")
