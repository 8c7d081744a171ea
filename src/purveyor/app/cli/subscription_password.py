"""`purveyor subscription password`: set the password of a subscription."""

from typing import Annotated

import typer

from purveyor.app.cli.backends.api_access import call_backend, find_api
from purveyor.app.cli.backends.subscription_backend import DirectSubscriptions, NewPassword, RemoteSubscriptions
from purveyor.app.cli.context import Cli, JsonFlag
from purveyor.app.cli.output import write, write_json
from purveyor.app.cli.parsers import parse_duration
from purveyor.app.cli.secret_input import AskPassword, GeneratePassword, PasswordFile, choose_password
from purveyor.model.errors import InvalidInput, InvalidName


def check_not_login(cli: Cli, name: str) -> None:
    """Raise InvalidName if a login of the settings has this name: a subscription logs in with its name.

    Over HTTP the settings of the API count, and the API checks them.
    """
    if find_api(cli) is not None:
        return
    settings = cli.settings()
    own = (settings.admin_username, settings.events_username, settings.prefill_username)
    if name in {*own, *(each.username for each in settings.publishers)}:
        raise InvalidName(f"the name {name!r} belongs to a login of the settings", fix="choose another name")


def password(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The subscription.")],
    password_file: PasswordFile = None,
    ask_password: AskPassword = False,
    generate_password: GeneratePassword = False,
    keep: Annotated[
        str | None, typer.Option(metavar="DURATION", help="How long the last password stays valid.")
    ] = None,
    keep_tokens: Annotated[
        bool, typer.Option("--keep-tokens", help="Keep the tokens valid; else they end with the last password.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Set the password with which a subscription pulls its messages from the API.

    The tokens of the subscription end with its last password: at once, or after --keep. With --keep-tokens they stay
    valid.
    """
    cli = Cli.of(ctx, as_json)
    given = choose_password(password_file, ask=ask_password, generate=generate_password)
    if given is None:
        raise InvalidInput("no password is given", fix="give --password-file, --ask-password or --generate-password")
    seconds = 0.0 if keep is None else parse_duration(keep).total_seconds()
    check_not_login(cli, name)
    chosen = NewPassword(text=given.text, keep_seconds=seconds, keep_tokens=keep_tokens)
    call_backend(
        cli,
        DirectSubscriptions.open,
        RemoteSubscriptions,
        lambda subscriptions: subscriptions.set_password(name, chosen),
    )
    if cli.json:
        write_json({"name": name, **given.password_json()})
    else:
        write("\n".join(filter(None, (f"Set the password of {name}", given.password_line()))))
