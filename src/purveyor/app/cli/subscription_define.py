"""`purveyor subscription add` and `edit`: define a subscription, and change its options."""

from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer

from purveyor.app.cli.backends.api_access import call_backend, find_api
from purveyor.app.cli.backends.subscription_backend import (
    DirectSubscriptions,
    NewSubscription,
    RemoteSubscriptions,
    SubscriptionBackend,
)
from purveyor.app.cli.context import Cli, JsonFlag, Topics
from purveyor.app.cli.output import write, write_json
from purveyor.app.cli.parsers import parse_topic
from purveyor.app.cli.secret_input import AskPassword, GeneratePassword, PasswordFile, choose_password
from purveyor.app.cli.subscription_options import (
    AddTopics,
    DeadLetters,
    DeliveryOption,
    FilterAttribute,
    FilterField,
    Hide,
    HideNothing,
    Lease,
    MaxAttempts,
    MaxBackoff,
    MinBackoff,
    NewTopics,
    OptionFlags,
    OrderOption,
    PrefillNewTopics,
    RemoveTopics,
    Reset,
    Retention,
    TopicFlags,
)
from purveyor.app.cli.subscription_password import check_not_login
from purveyor.app.cli.subscription_push import (
    AckDeadline,
    AfterOption,
    BearerEnv,
    BearerFile,
    CodesOption,
    FormatOption,
    MakeSecret,
    PushFlags,
    PushUrls,
    SecretEnv,
    SecretFile,
    choose_bearer,
    choose_secret,
)
from purveyor.app.subscription_input import PushInput, new_definition
from purveyor.model.errors import InvalidInput
from purveyor.model.json_fields import Json

T = TypeVar("T")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The subscription.")]


def add(
    ctx: typer.Context,
    name: Name,
    topic: Topics = None,
    prefill: Annotated[bool, typer.Option("--prefill", help="Deliver the current state of all objects first.")] = False,
    filter_attribute: FilterAttribute = None,
    filter_field: FilterField = None,
    hide: Hide = None,
    hide_nothing: HideNothing = False,
    retention: Retention = None,
    delivery: DeliveryOption = None,
    order_by: OrderOption = None,
    lease: Lease = None,
    max_attempts: MaxAttempts = None,
    min_backoff: MinBackoff = None,
    max_backoff: MaxBackoff = None,
    dead_letter: DeadLetters = False,
    push: PushUrls = None,
    ack_deadline: AckDeadline = None,
    push_format: FormatOption = None,
    ack_codes: CodesOption = None,
    after_dead_letter: AfterOption = None,
    secret: MakeSecret = False,
    secret_file: SecretFile = None,
    secret_env: SecretEnv = None,
    bearer_file: BearerFile = None,
    bearer_env: BearerEnv = None,
    password_file: PasswordFile = None,
    ask_password: AskPassword = False,
    generate_password: GeneratePassword = False,
    as_json: JsonFlag = False,
) -> None:
    """Add a subscription: the dispatcher writes every matching event that is accepted from now on to its queue.

    Adding it again changes nothing; the same name with other parameters is an error. The value of a field is JSON
    (3, true, "3") or text. With a password the subscription can pull its messages from the API. With --push,
    `purveyor serve push` sends them to its endpoint.
    """
    if not topic:
        raise InvalidInput(
            f"subscription {name!r} needs a topic", fix="add --topic REALM:TOPIC, such as udm:users/user"
        )
    topics = [each.to_json() for each in dict.fromkeys(map(parse_topic, topic))]
    signing_secret, is_generated = choose_secret(make=secret, file=secret_file, env=secret_env)
    flags = OptionFlags(
        filter_attributes=filter_attribute,
        filter_fields=filter_field,
        hide=hide,
        hide_nothing=hide_nothing,
        retention=retention,
        delivery=delivery,
        order_by=order_by,
        lease=lease,
        max_attempts=max_attempts,
        min_backoff=min_backoff,
        max_backoff=max_backoff,
        dead_letter=dead_letter,
        push=PushFlags(
            urls=push,
            ack_deadline=ack_deadline,
            format=push_format,
            ack_codes=ack_codes,
            after=after_dead_letter,
            secret=signing_secret,
            secret_generated=is_generated,
            bearer=choose_bearer(file=bearer_file, env=bearer_env),
        ),
    )
    given = choose_password(password_file, ask=ask_password, generate=generate_password)
    cli = Cli.of(ctx, as_json)
    check_not_login(cli, name)
    new = NewSubscription(
        name=name,
        realms_topics=topics,
        request_prefill=prefill,
        flags=flags,
        password=None if given is None else given.text,
    )
    body = new.body()  # a mistake in the flags needs no server
    if find_api(cli) is None:
        new_definition(body, PushInput.from_settings(cli.settings()), None)

    async def work(subscriptions: SubscriptionBackend) -> tuple[Json, bool]:
        created = await subscriptions.add(new)
        return await subscriptions.details(name), created

    found, created = call(cli, work)
    if cli.json:
        shown = {**(given.password_json() if given else {}), **(flags.push.secret_json() if created else {})}
        write_json({**found, "created": created, **shown}, indent=2)
    else:
        write(f"{'Added' if created else 'Unchanged:'} subscription {name}, begins after {found['begin']}")
        if given is not None and given.generated:
            write(given.password_line())
        if created and flags.push.secret_generated:
            write(flags.push.secret_line())


def edit(
    ctx: typer.Context,
    name: Name,
    topic: NewTopics = None,
    add_topic: AddTopics = None,
    remove_topic: RemoveTopics = None,
    prefill: PrefillNewTopics = False,
    filter_attribute: FilterAttribute = None,
    filter_field: FilterField = None,
    hide: Hide = None,
    hide_nothing: HideNothing = False,
    retention: Retention = None,
    delivery: DeliveryOption = None,
    order_by: OrderOption = None,
    lease: Lease = None,
    max_attempts: MaxAttempts = None,
    min_backoff: MinBackoff = None,
    max_backoff: MaxBackoff = None,
    dead_letter: DeadLetters = False,
    push: PushUrls = None,
    ack_deadline: AckDeadline = None,
    push_format: FormatOption = None,
    ack_codes: CodesOption = None,
    after_dead_letter: AfterOption = None,
    secret: MakeSecret = False,
    secret_file: SecretFile = None,
    secret_env: SecretEnv = None,
    keep_secret: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="How long to sign with the last secret as well; default: 24h."),
    ] = None,
    bearer_file: BearerFile = None,
    bearer_env: BearerEnv = None,
    reset: Reset = None,
    as_json: JsonFlag = False,
) -> None:
    """Change options of a subscription; the others stay, and so does its queue. --reset sets one to its default.

    New topics, a new filter or new hidden fields replace the old ones behind the position that the command prints; what
    is in the queue stays. With --prefill the objects of topics that are new are delivered first. Another delivery
    mode has its own order, and only push keeps the push settings. With --push a pull subscription becomes push. After
    a new secret, messages carry signatures of both secrets for some time, so that the endpoint can change over.
    """
    signing_secret, is_generated = choose_secret(make=secret, file=secret_file, env=secret_env)
    flags = OptionFlags(
        filter_attributes=filter_attribute,
        filter_fields=filter_field,
        hide=hide,
        hide_nothing=hide_nothing,
        retention=retention,
        delivery=delivery,
        order_by=order_by,
        lease=lease,
        max_attempts=max_attempts,
        min_backoff=min_backoff,
        max_backoff=max_backoff,
        dead_letter=dead_letter,
        push=PushFlags(
            urls=push,
            ack_deadline=ack_deadline,
            format=push_format,
            ack_codes=ack_codes,
            after=after_dead_letter,
            secret=signing_secret,
            secret_generated=is_generated,
            bearer=choose_bearer(file=bearer_file, env=bearer_env),
            keep_secret=keep_secret,
        ),
        topics=TopicFlags.parse(topic, add_topic, remove_topic, prefill=prefill),
        reset=tuple(dict.fromkeys(reset or ())),
    )
    if flags == OptionFlags():
        raise InvalidInput(
            f"no change of subscription {name!r} is given", fix="see `purveyor subscription edit --help`"
        )
    cli = Cli.of(ctx, as_json)

    async def work(subscriptions: SubscriptionBackend) -> tuple[Json, int | None]:
        before = (await subscriptions.details(name)).get("in_force_after")
        await subscriptions.edit(name, flags)
        after = await subscriptions.details(name)
        position = after.get("in_force_after")
        return after, None if position == before else position

    found, position = call(cli, work)
    if cli.json:
        write_json({**found, **flags.push.secret_json()}, indent=2)
    else:
        since = "" if position is None else f", in force after {position}"
        write("\n".join(filter(None, (f"Changed subscription {name}{since}", flags.push.secret_line()))))


def call(cli: Cli, work: Callable[[SubscriptionBackend], Awaitable[T]]) -> T:
    """Run work on the subscriptions."""
    return call_backend(cli, DirectSubscriptions.open, RemoteSubscriptions, work)
