"""`purveyor queues permissions`: the NATS users of the components, for a server that somebody else runs."""

from typing import Annotated

import typer

from purveyor.app.cli.context import Cli, JsonFlag
from purveyor.app.cli.render import write, write_json
from purveyor.jetstream.server.users import render_users
from purveyor.queues.permissions import components, subscription_user


def permissions(
    ctx: typer.Context,
    subscription: Annotated[
        list[str] | None,
        typer.Option("--subscription", metavar="NAME", help="Only a user bound to this subscription; repeatable."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Print what each component may publish and subscribe, as configuration of nats-server.

    The embedded server has the users of the components already. For a server of your own, put the text into its
    configuration, with passwords in the environment variables that it names, and give each component its user in
    PURVEYOR_NATS_URL and its inbox in PURVEYOR_NATS_INBOX. A user bound to a subscription reads and empties that queue
    and no other.
    """
    cli = Cli.of(ctx, as_json)
    users = [subscription_user(name) for name in subscription] if subscription else list(components())
    if cli.json:
        write_json([each.to_json() for each in users], indent=2)
        return
    passwords = {each.user: f"${variable(each.user)}" for each in users}
    inside = "\n".join(f"    {line}" for line in render_users(users, passwords).splitlines())
    write(f"authorization {{\n  users: [\n{inside}\n  ]\n}}")


def variable(user: str) -> str:
    """The environment variable of a user's password.

    >>> variable("subscription-ox")
    'NATS_PASSWORD_SUBSCRIPTION_OX'
    """
    return f"NATS_PASSWORD_{user.upper().replace('-', '_')}"
