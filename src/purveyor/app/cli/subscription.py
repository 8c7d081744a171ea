"""`purveyor subscription`: add, show, edit, pause, resume, prefill, replay and delete subscriptions."""

from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer

from purveyor.app.cli.context import Cli, JsonFlag, YesFlag, confirm, examples
from purveyor.app.cli.output import escape, write, write_json, write_note
from purveyor.app.cli.parsers import (
    parse_duration,
    parse_pair,
    parse_place,
    parse_scalar,
    parse_topic,
)
from purveyor.app.cli.render import format_table
from purveyor.app.cli.subscription_password import (
    AskPassword,
    GeneratePassword,
    PasswordFile,
    check_not_login,
    choose_password,
    credentials,
    password,
)
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
    choose_bearer,
    choose_secret,
    edit,
)
from purveyor.app.cli.subscription_view import (
    describe_state,
    registered_json,
    status_json,
    status_text,
    unreadable_json,
    unreadable_text,
)
from purveyor.app.push_input import PushInput
from purveyor.delivery.push.push_reports import PushProblem, read_problems
from purveyor.delivery.subscriptions import Subscriptions, SubscriptionStatus, backlogs, read_status
from purveyor.model.delivery_policy import read_hidden_fields
from purveyor.model.errors import InvalidInput
from purveyor.model.subscription import Filter, Scalar, Subscription
from purveyor.queues.client import Queues
from purveyor.queues.registry import Snapshot, Unreadable

app = typer.Typer(
    help="Add, show, edit, pause, replay and delete subscriptions.", rich_markup_mode=None, add_completion=False
)
T = TypeVar("T")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The subscription.")]
Topics = Annotated[
    list[str] | None,
    typer.Option(
        "--topic",
        "-t",
        metavar="REALM:TOPIC",
        help="A topic: exact, or a regular expression that matches all of it; repeatable.",
    ),
]


@app.command(
    "add",
    epilog=examples(
        "purveyor subscription add ox --topic udm:users/user --topic 'udm:groups/.*' --prefill",
        "purveyor subscription add ox --topic udm:users/user --generate-password",
        "purveyor subscription add north --topic 'udm:users/.*' --filter-attribute tenant=north",
        "purveyor subscription add it --topic udm:users/user --filter-field department=it --filter-field level=3",
        "purveyor subscription add shop --topic 'shop:.*' --push https://shop.example/events --max-attempts 5 --secret",
    ),
)
def add(
    ctx: typer.Context,
    name: Name,
    topic: Topics = None,
    prefill: Annotated[bool, typer.Option("--prefill", help="Deliver the current state of all objects first.")] = False,
    filter_attribute: Annotated[
        list[str] | None,
        typer.Option(
            "--filter-attribute",
            metavar="NAME=VALUE",
            help="Only events with this attribute; the same name again adds a value.",
        ),
    ] = None,
    filter_field: Annotated[
        list[str] | None,
        typer.Option(
            "--filter-field",
            metavar="PATH=VALUE",
            help="Only objects with this field; the same path again adds a value.",
        ),
    ] = None,
    hide: Annotated[
        list[str] | None,
        typer.Option("--hide", metavar="FIELD", help="Remove this field, instead of the password fields; repeatable."),
    ] = None,
    hide_nothing: Annotated[bool, typer.Option("--hide-nothing", help="Remove no fields, not even passwords.")] = False,
    retention: Annotated[
        str | None,
        typer.Option(
            "--retention", metavar="DURATION", help="Unacknowledged messages expire after this time, such as 7d."
        ),
    ] = None,
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
    attributes: dict[str, tuple[str, ...]] = {}
    for key, value in map(parse_pair, filter_attribute or []):
        attributes[key] = (*attributes.get(key, ()), value)
    fields: dict[str, tuple[Scalar, ...]] = {}
    for key, value in map(parse_pair, filter_field or []):
        fields[key] = (*fields.get(key, ()), parse_scalar(value))
    definition = Subscription(
        name=name,
        realms_topics=tuple(dict.fromkeys(map(parse_topic, topic))),
        request_prefill=prefill,
        filter=Filter(attributes, fields),
        hidden_fields=_hidden(hide, nothing=hide_nothing),
        retention_seconds=None if retention is None else parse_duration(retention).total_seconds(),
    )
    signing_secret, is_generated = choose_secret(make=secret, file=secret_file, env=secret_env)
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
        secret=signing_secret,
        secret_generated=is_generated,
        bearer=choose_bearer(file=bearer_file, env=bearer_env),
    )
    flags.require_endpoint()
    given = choose_password(password_file, ask=ask_password, generate=generate_password)
    cli = Cli.of(ctx, as_json)
    settings = cli.settings()
    check_not_login(name, settings)
    push_input = PushInput.from_settings(settings)

    async def work(subscriptions: Subscriptions, queues: Queues) -> tuple[SubscriptionStatus, bool]:
        wanted = flags.add_to(definition, push_input, await subscriptions.find(name))
        record, created = await subscriptions.add(wanted)
        if given is not None:
            # A crash before this leaves a subscription without a password; the same command again sets it.
            with credentials(queues, settings.replicas) as known:
                created |= await known.set_first_password(name, record.incarnation, given.text)
        return await _read_status(subscriptions, queues, name), created

    found, created = _call(cli, work)
    if cli.json:
        shown = {**(given.password_json() if given else {}), **(flags.secret_json() if created else {})}
        write_json({**status_json(found), "created": created, **shown}, indent=2)
    else:
        begin = found.registered.record.begin
        write(f"{'Added' if created else 'Unchanged:'} subscription {name}, events after position {begin}")
        if given is not None and given.generated:
            write(given.password_line())
        if created and flags.secret_generated:
            write(flags.secret_line())


def _hidden(given: list[str] | None, *, nothing: bool) -> tuple[str, ...]:
    if nothing and given:
        raise InvalidInput("--hide and --hide-nothing exclude each other", fix="give one of them")
    return read_hidden_fields({"hidden_fields": [] if nothing else given or None})


app.command(
    "edit",
    epilog=examples(
        "purveyor subscription edit shop --ack-deadline 30s --max-attempts 10",
        "purveyor subscription edit shop --push https://a.example/in --push https://b.example/in",
        "purveyor subscription edit shop --secret --keep-secret 1h",
    ),
)(edit)


app.command(
    "password",
    epilog=examples(
        "purveyor subscription password ox --generate-password",
        "purveyor subscription password ox --password-file ox.password --keep 1h",
    ),
)(password)


@app.command("list", epilog=examples("purveyor subscription list", "purveyor subscription list --json"))
def list_(ctx: typer.Context, as_json: JsonFlag = False) -> None:
    """List the subscriptions."""
    cli = Cli.of(ctx, as_json)

    async def work(
        subscriptions: Subscriptions, queues: Queues
    ) -> tuple[Snapshot, dict[str, int], dict[str, PushProblem]]:
        snapshot = await subscriptions.list()
        return snapshot, await backlogs(queues), await read_problems(queues, [*snapshot.subscriptions.values()])

    found, waiting, problems = _call(cli, work)
    for unread in found.unreadable.values():
        write_note(f"subscription {unread.name} is unreadable: {unread.reason}")
    if cli.json:
        shown = [registered_json(each, problems.get(each.name)) for each in found.subscriptions.values()]
        shown += [unreadable_json(each) for each in found.unreadable.values()]
        write_json([{**each, "backlog": waiting.get(str(each["name"]))} for each in shown], indent=2)
        return
    rows = [
        (
            each.name,
            [f"{topic.realm}:{topic.topic}" for topic in each.record.definition.realms_topics],
            describe_state(each, problems.get(each.name)),
            each.record.begin,
            waiting.get(each.name),
            each.prefill.status if each.prefill else None,
        )
        for each in found.subscriptions.values()
    ]
    rows += [
        (each.name, [], "unreadable", each.begin, waiting.get(each.name), None) for each in found.unreadable.values()
    ]
    write(format_table(("NAME", "TOPICS", "STATE", "BEGIN", "BACKLOG", "PREFILL"), rows, wrap=("TOPICS",)))


@app.command("show", epilog=examples("purveyor subscription show ox", "purveyor subscription show ox --json"))
def show(ctx: typer.Context, name: Name, as_json: JsonFlag = False) -> None:
    """Show a subscription: its definition, its position, and its backlog."""
    cli = Cli.of(ctx, as_json)

    async def work(subscriptions: Subscriptions, queues: Queues) -> SubscriptionStatus | Unreadable:
        found = await (await subscriptions.registry()).find(name)
        return found if isinstance(found, Unreadable) else await _read_status(subscriptions, queues, name)

    found = _call(cli, work)
    if isinstance(found, Unreadable):
        write_json(unreadable_json(found), indent=2) if cli.json else write(unreadable_text(found))
    else:
        write_json(status_json(found), indent=2) if cli.json else write(status_text(found))


@app.command("pause", epilog=examples("purveyor subscription pause ox"))
def pause(ctx: typer.Context, name: Name, as_json: JsonFlag = False) -> None:
    """Stop deliveries of a subscription until it is resumed; its queue still fills."""
    cli = Cli.of(ctx, as_json)
    _call(cli, lambda subscriptions, _: subscriptions.pause(name))
    write_json({"name": name, "paused": True}) if cli.json else write(f"Paused {name}")


@app.command("resume", epilog=examples("purveyor subscription resume ox"))
def resume(ctx: typer.Context, name: Name, as_json: JsonFlag = False) -> None:
    """Resume deliveries; messages that its queue has refused are written now."""
    cli = Cli.of(ctx, as_json)

    async def work(subscriptions: Subscriptions, _: Queues) -> int | None:
        suspended = (await subscriptions.get(name)).suspended
        await subscriptions.resume(name)
        return None if suspended is None else suspended.position

    behind = _call(cli, work)
    if cli.json:
        write_json({"name": name, "paused": False, "catch_up_from": behind})
    else:
        write(f"Resumed {name}" + ("" if behind is None else f"; catching up from position {behind}"))


@app.command("prefill", epilog=examples("purveyor subscription prefill ox"))
def prefill_(ctx: typer.Context, name: Name, as_json: JsonFlag = False) -> None:
    """Request a failed prefill again."""
    cli = Cli.of(ctx, as_json)
    state = _call(cli, lambda subscriptions, _: subscriptions.request_prefill(name))
    if cli.json:
        write_json({"name": name, **state.to_json()})
    else:
        write(f"Prefill of {name}: {state.status.value}, attempt {state.attempt}, as of position {state.position}")


@app.command(
    "replay",
    epilog=examples(
        "purveyor subscription replay ox --from 1200 --to 1300",
        "purveyor subscription replay ox --from 2026-11-15T12:00:00Z --topic 'udm:groups/.*'",
        "purveyor subscription replay ox --from 2h",
    ),
)
def replay(
    ctx: typer.Context,
    name: Name,
    from_: Annotated[
        str, typer.Option("--from", metavar="TIME|POSITION", help="The start; also a duration ago, such as 2h.")
    ],
    to: Annotated[str | None, typer.Option("--to", metavar="TIME|POSITION", help="The end; default: now.")] = None,
    topic: Topics = None,
    as_json: JsonFlag = False,
) -> None:
    """Write matching events of the past to the queue again; with --topic only those topics."""
    topics = tuple(map(parse_topic, topic or []))
    begin, end = parse_place(from_), None if to is None else parse_place(to)
    cli = Cli.of(ctx, as_json)
    job = _call(cli, lambda subscriptions, _: subscriptions.replay(name, begin, end, topics))
    if cli.json:
        write_json(job.to_json())
    else:
        write(f"Replay of {name} from {escape(from_)} to {escape(to or 'now')} is requested (job {job.job})")


@app.command("delete", epilog=examples("purveyor subscription delete ox --yes"))
def delete(
    ctx: typer.Context,
    name: Name,
    yes: YesFlag = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also delete a subscription of a newer version.", show_default=False)
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Delete a subscription with all messages in its queue."""
    confirm(f"Delete subscription {name} with all messages in its queue?", yes=yes)
    cli = Cli.of(ctx, as_json)
    replicas = cli.settings().replicas

    async def work(subscriptions: Subscriptions, queues: Queues) -> None:
        incarnation = await subscriptions.delete(name, force=force)
        with credentials(queues, replicas) as known:
            await known.remove(name, incarnation)

    _call(cli, work)
    write_json({"name": name, "deleted": True}) if cli.json else write(f"Deleted {name}")


def _call(cli: Cli, work: Callable[[Subscriptions, Queues], Awaitable[T]]) -> T:
    replicas = cli.settings().replicas
    return cli.call(lambda queues: work(Subscriptions(queues, replicas=replicas), queues))


async def _read_status(subscriptions: Subscriptions, queues: Queues, name: str) -> SubscriptionStatus:
    # Not through `get`, which hides a subscription whose deletion was interrupted.
    registry = await subscriptions.registry()
    return await read_status(queues, registry, await registry.get(name))
