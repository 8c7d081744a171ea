"""`purveyor subscription edit`: change how a subscription is pushed, while it goes on."""

from typing import Annotated

import typer

from purveyor.app.cli.context import Cli, JsonFlag
from purveyor.app.cli.render import write, write_json
from purveyor.app.cli.subscription_push import (
    AckDeadline,
    AfterOption,
    BearerEnv,
    BearerFile,
    CodesOption,
    DeadLetters,
    FormatOption,
    MakeSecret,
    MaxAttempts,
    MaxBackoff,
    MinBackoff,
    OrderOption,
    PushFlags,
    PushUrls,
    SecretEnv,
    SecretFile,
    chosen_bearer,
    chosen_secret,
)
from purveyor.app.cli.subscription_view import as_dict
from purveyor.app.push_input import PushEdge
from purveyor.delivery.subscription_status import Overview, look
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.model.errors import InvalidInput
from purveyor.queues.client import Queues


def edit(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The subscription.")],
    push: PushUrls = None,
    ack_deadline: AckDeadline = None,
    max_attempts: MaxAttempts = None,
    min_backoff: MinBackoff = None,
    max_backoff: MaxBackoff = None,
    order_by: OrderOption = None,
    dead_letter: DeadLetters = False,
    push_format: FormatOption = None,
    ack_codes: CodesOption = None,
    after_dead_letter: AfterOption = None,
    secret: MakeSecret = False,
    secret_file: SecretFile = None,
    secret_env: SecretEnv = None,
    keep_secret: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="For so long the last secret signs as well; default: 24h."),
    ] = None,
    bearer_file: BearerFile = None,
    bearer_env: BearerEnv = None,
    as_json: JsonFlag = False,
) -> None:
    """Change how a subscription is pushed; what is not given stays. With --push a pulled one is pushed from now on.

    A new secret signs beside the last one for a while, so that the endpoint can change over.
    """
    signed, made = chosen_secret(make=secret, file=secret_file, env=secret_env)
    flags = PushFlags(
        urls=push,
        ack_deadline=ack_deadline,
        max_attempts=max_attempts,
        min_backoff=min_backoff,
        max_backoff=max_backoff,
        order_by=order_by,
        dead_letter=dead_letter,
        format=push_format,
        ack_codes=ack_codes,
        after=after_dead_letter,
        secret=signed,
        secret_made=made,
        bearer=chosen_bearer(file=bearer_file, env=bearer_env),
        keep_secret=keep_secret,
    )
    if flags == PushFlags():
        raise InvalidInput(f"nothing to change of subscription {name!r}", fix="see `purveyor subscription edit --help`")
    cli = Cli.of(ctx, as_json)
    settings = cli.settings()
    edge = PushEdge.of(settings)

    async def work(queues: Queues) -> Overview:
        subscriptions = Subscriptions(queues, replicas=settings.replicas)
        await subscriptions.redefine(name, lambda now: flags.changed(now, edge))
        registry = await subscriptions.registry()
        return await look(queues, registry, await registry.get(name))

    found = cli.call(work)
    if cli.json:
        write_json({**as_dict(found), **flags.shown()}, indent=2)
    else:
        write("\n".join(filter(None, (f"Changed subscription {name}", flags.line()))))
