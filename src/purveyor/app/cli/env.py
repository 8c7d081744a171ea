"""`purveyor env`: the environment variables with which other programs reach the running system.

A variable that holds a password is not printed on a terminal, where it would stay in the scrollback: only into a pipe,
as in `eval "$(purveyor env)"`, or with --show-secrets.
"""

import shlex
import sys
from typing import Annotated, Final
from urllib.parse import quote, urlsplit

import typer

from purveyor.app.cli.context import Cli, JsonFlag, examples
from purveyor.app.cli.output import escape, write, write_json, write_note
from purveyor.app.running_parts import running_api
from purveyor.app.settings import PREFIX, Settings
from purveyor.jetstream.address import DEFAULT_INBOX, Address

app = typer.Typer(rich_markup_mode=None, add_completion=False)
NAMES: Final = (
    "DATA_DIR",
    "NATS_URL",
    "NATS_CREDENTIALS",
    "NATS_INBOX",
    "NATS_TLS_CA",
    "NATS_TLS_CERT",
    "NATS_TLS_KEY",
    "NATS_TLS_HOSTNAME",
    "API_URL",
)
"""The settings that `env` prints, as variables with the prefix of the settings."""


@app.command(
    "env",
    epilog=examples(
        'eval "$(purveyor env)"',
        "purveyor env --json",
        'eval "$(purveyor env --unset)"',
    ),
)
def env(
    ctx: typer.Context,
    show_secrets: Annotated[
        bool, typer.Option("--show-secrets", help="Print passwords on a terminal as well.", show_default=False)
    ] = False,
    unset: Annotated[
        bool, typer.Option("--unset", help="Print how to remove the variables from a shell.", show_default=False)
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Print the environment variables with which other programs reach the running `purveyor up`.

    They name the data directory, the NATS server and the API. The URL of the embedded NATS server holds its password,
    so it is printed into a pipe, and on a terminal only with --show-secrets. A program of Purveyor on this machine
    needs only the data directory: it reads the password from there. In a shell with PURVEYOR_NATS_URL, `purveyor up`
    starts no server of its own: remove the variables with --unset, or use another shell.
    """
    cli = Cli.of(ctx, as_json)
    if unset:
        names = [PREFIX + name for name in NAMES]
        write_json(names) if cli.json else write(f"unset {' '.join(names)}")
        return
    settings = cli.settings()
    variables = find_variables(settings, cli.address())
    hides = sys.stdout.isatty() and not show_secrets
    hidden = [name for name in variables if hides and _has_secret(variables, name)]
    shown = {name: value for name, value in variables.items() if name not in hidden}
    if cli.json:
        write_json(shown, indent=2)
    else:
        for name, value in shown.items():
            write(f"export {name}={shlex.quote(escape(value))}")
    for name in hidden:
        write_note(f'{name} holds a password and is not printed here: use eval "$(purveyor env)", or --show-secrets')


def find_variables(settings: Settings, address: Address) -> dict[str, str]:
    """Return the variables for a server, and for the API of the settings or of the data directory if one runs."""
    tls, api = address.tls, running_api(settings.data_dir)
    values = {
        "DATA_DIR": settings.data_dir.absolute(),
        "NATS_URL": _url(address),
        "NATS_CREDENTIALS": None if address.credentials is None else address.credentials.absolute(),
        "NATS_INBOX": address.inbox if address.inbox != DEFAULT_INBOX else None,
        "NATS_TLS_CA": None if tls is None or tls.ca is None else tls.ca.absolute(),
        "NATS_TLS_CERT": None if tls is None or tls.certificate is None else tls.certificate.absolute(),
        "NATS_TLS_KEY": None if tls is None or tls.key is None else tls.key.absolute(),
        "NATS_TLS_HOSTNAME": None if tls is None else tls.hostname,
        "API_URL": settings.api_url or (None if api is None else api.url),
    }
    return {PREFIX + name: str(values[name]) for name in NAMES if values[name] is not None}


def _url(address: Address) -> str:
    """Return the URLs of the servers with the login, if that is not in a file."""
    login = ""
    if address.user is not None and address.password is not None:
        login = f"{quote(address.user, safe='')}:{quote(address.password, safe='')}@"
    elif address.token is not None:
        login = f"{quote(address.token, safe='')}@"
    return ",".join(url.replace("://", f"://{login}", 1) for url in address.urls)


def _has_secret(variables: dict[str, str], name: str) -> bool:
    return name == f"{PREFIX}NATS_URL" and any("@" in urlsplit(each).netloc for each in variables[name].split(","))
