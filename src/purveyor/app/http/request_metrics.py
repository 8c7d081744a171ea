"""Counts the answers of the API by route, method and status, for Prometheus. Plain ASGI: every request pays it."""

from starlette.types import Message, Scope, Send

from purveyor.model.metrics import HTTP_REQUESTS


def counted(scope: Scope, send: Send) -> Send:
    """Pass an answer on, and count it by its route, method and status."""

    async def passed(message: Message) -> None:
        if message["type"] == "http.response.start":
            path = getattr(scope.get("route"), "path", None)
            count(str(path or "other"), scope["method"], message["status"])
        await send(message)

    return passed


def count(route: str, method: str, status: int) -> None:
    """One answer more. The route as it is documented: with the names of subscriptions there would be one for each."""
    HTTP_REQUESTS.add(route, method, str(status))
