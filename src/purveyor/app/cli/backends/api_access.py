"""The choice between the NATS server and the HTTP API, and the login at the API.

A command that works both ways has an interface in this package with two implementations. Both return the JSON of the
HTTP API, so the command prints the same. `call_backend` builds the one that the settings choose.
"""

import asyncio
import ssl
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Final, Self, TypeVar
from urllib.parse import quote

from purveyor.app.cli.context import Cli
from purveyor.app.cli.output import write_note
from purveyor.app.cli.secret_input import read_first_line
from purveyor.app.settings import Settings
from purveyor.model.errors import InvalidConfig, InvalidInput
from purveyor.queues.client import Queues

if TYPE_CHECKING:
    from purveyor.client.api_client import ApiAccess, ApiAnswer

S = TypeVar("S")
T = TypeVar("T")
_SECRETS: Final = ("api_password", "api_password_file", "api_token", "api_token_file")
_LOGIN_FIX: Final = (
    "set PURVEYOR_API_TOKEN, or --api-user and PURVEYOR_API_PASSWORD; files work too: --api-token-file, "
    "--api-password-file"
)


class ApiRoutes:
    """The routes of the API for one command; each request is repeated for as long as `--timeout` allows."""

    def __init__(self, access: "ApiAccess", *, patience_seconds: float, headers: dict[str, str] | None = None) -> None:
        from purveyor.client.api_client import ApiClient  # noqa: PLC0415 - a slow import that only --api needs

        self._patience_seconds = patience_seconds
        self._client = ApiClient(access, base="/v1", headers=headers, on_failure=self._note)
        self._url = access.url

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.__aexit__(None, None, None)

    async def request(self, method: str, *path: str, body: object = None, wait_seconds: float = 0.0) -> "ApiAnswer":
        """Return the answer of a route whose path has these parts; the last one may hold a query after `?`."""
        return await self._client.request(
            method, "/".join(path), body, patience_seconds=self._patience_seconds, wait_seconds=wait_seconds
        )

    def _note(self, reason: str) -> None:
        if sys.stderr.isatty():
            write_note(
                f"the API at {self._url} is unavailable: {reason}; trying again for {self._patience_seconds:g} seconds"
            )


def part(text: str, *, safe: str = "") -> str:
    """Encode a part of a path; the characters in `safe` stay as they are.

    >>> part("a b/c"), part("a b/c", safe="/")
    ('a%20b%2Fc', 'a%20b/c')
    """
    try:
        return quote(text, safe=safe)
    except UnicodeEncodeError:  # bytes of the command line that are not UTF-8
        raise InvalidInput(f"{text!r} is not UTF-8", fix="write it in UTF-8") from None


def find_api(cli: Cli) -> "ApiAccess | None":
    """Return the API of the settings and the login there; None if commands use the NATS server.

    A URL that comes without a login from the environment or the file chooses nothing while a NATS server or a data
    directory is set: other programs need that URL too, and `purveyor env` prints it.
    """
    settings = cli.settings()
    url = settings.api_url
    if url is None:
        return None
    secret = _chosen_secret(cli, settings)
    has_server = bool({"nats_url", "data_dir"} & settings.model_fields_set)
    if secret is None and cli.root.flags.get("api_url") is None and has_server:
        return None
    if secret is None:
        raise InvalidInput(f"there is no login for the API at {url}", fix=_LOGIN_FIX)
    from purveyor.client.api_client import ApiAccess, authorization_header  # noqa: PLC0415 - see above

    text = _read_secret(settings, secret)
    if secret.startswith("api_token"):
        if cli.root.flags.get("api_username") is not None:
            raise InvalidInput(
                f"--api-user and {secret} exclude each other: a token is of one login", fix="leave one of them out"
            )
        authorization = authorization_header("", None, _check_token(text, secret))
    elif settings.api_username is None:
        raise InvalidInput(
            f"the login at the API {url} has a password and no user",
            fix="give --api-user, or set PURVEYOR_API_USERNAME: admin, events, or the name of a subscription",
        )
    else:
        authorization = authorization_header(settings.api_username, text, None)
    return ApiAccess(url, authorization, _tls(settings))


def call_backend(
    cli: Cli,
    direct: Callable[[Queues, Settings], AbstractAsyncContextManager[S]],
    remote: Callable[[ApiRoutes], S],
    work: Callable[[S], Awaitable[T]],
    *,
    headers: dict[str, str] | None = None,
) -> T:
    """Run the work of a command on the NATS server or over the API."""
    access = find_api(cli)
    if access is None:
        settings = cli.settings()

        async def on_server(queues: Queues) -> T:
            async with direct(queues, settings) as backend:
                return await work(backend)

        return cli.call(on_server)

    async def over_http() -> T:
        async with ApiRoutes(access, patience_seconds=cli.root.timeout_seconds, headers=headers) as routes:
            return await work(remote(routes))

    return asyncio.run(over_http())


def _chosen_secret(cli: Cli, settings: Settings) -> str | None:
    """Return the setting with the secret of the login; a flag is stronger than the environment and the file."""
    given = [name for name in _SECRETS if getattr(settings, name) is not None]
    chosen = [name for name in given if cli.root.flags.get(name) is not None] or given
    if len(chosen) > 1:
        raise InvalidConfig(f"more than one login for the API: {' and '.join(chosen)}", fix="set one of them")
    return chosen[0] if chosen else None


def _read_secret(settings: Settings, name: str) -> str:
    found = getattr(settings, name)
    if not name.endswith("_file"):
        return str(found.get_secret_value())
    what = name.removeprefix("api_").removesuffix("_file")
    text = read_first_line(str(found), what, f"--{name.replace('_', '-')}")
    if not text:
        raise InvalidInput(f"there is no {what} in the first line of {found}", fix=f"check --{name.replace('_', '-')}")
    return text


def _check_token(text: str, setting: str) -> str:
    """Return a token if a header can hold it."""
    if not text.isascii() or not text.isprintable() or " " in text:
        raise InvalidInput(
            f"{setting} is no token: it holds white space or characters beyond ASCII",
            fix="give the field `token` of the answer of POST /v1/tokens",
        )
    return text


def _tls(settings: Settings) -> ssl.SSLContext | None:
    if settings.api_tls_ca is None:
        return None
    try:
        return ssl.create_default_context(cafile=settings.api_tls_ca)
    except OSError as error:  # TLS errors are OSErrors
        raise InvalidConfig(
            f"the certificate authority {settings.api_tls_ca} cannot be used: {error.strerror or error}",
            fix="check --api-tls-ca",
        ) from None
