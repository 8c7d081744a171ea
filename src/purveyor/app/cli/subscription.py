"""`purveyor subscription`: add, show, edit, pause, resume, prefill, replay and delete subscriptions."""

from typing import Annotated

import typer

from purveyor.app.cli.backends.subscription_backend import ReplayRange
from purveyor.app.cli.context import Cli, JsonFlag, Topics, YesFlag, confirm, examples
from purveyor.app.cli.output import escape, write, write_json, write_note
from purveyor.app.cli.parsers import parse_replay_point, parse_topic
from purveyor.app.cli.render import format_table
from purveyor.app.cli.subscription_attempts import EPILOG as ATTEMPTS_EPILOG
from purveyor.app.cli.subscription_attempts import attempts
from purveyor.app.cli.subscription_define import Name, add, call, edit
from purveyor.app.cli.subscription_password import password
from purveyor.app.cli.subscription_view import (
    describe_problem,
    describe_state,
    details_text,
    prefill_summary,
    topic_labels,
)

app = typer.Typer(
    help="Add, show, edit, pause, replay and delete subscriptions.", rich_markup_mode=None, add_completion=False
)


app.command(
    "add",
    epilog=examples(
        "purveyor subscription add ox --topic udm:users/user --topic 'udm:groups/.*' --prefill",
        "purveyor subscription add ox --topic udm:users/user --generate-password",
        "purveyor subscription add north --topic 'udm:users/.*' --filter-attribute tenant=north",
        "purveyor subscription add it --topic udm:users/user --filter-field department=it --filter-field level=3",
        "purveyor subscription add mail --topic 'udm:users/.*' --delivery parallel --order-by key --lease 2m",
        "purveyor subscription add shop --topic 'shop:.*' --push https://shop.example/events --max-attempts 5 --secret",
    ),
)(add)


app.command(
    "edit",
    epilog=examples(
        "purveyor subscription edit ox --lease 2m --max-attempts 10",
        "purveyor subscription edit ox --add-topic udm:mail/box --remove-topic 'udm:groups/.*' --prefill",
        "purveyor subscription edit it --filter-field department=it --filter-field department=hr",
        "purveyor subscription edit it --reset filter --reset retention",
        "purveyor subscription edit mail --delivery parallel --order-by key",
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


app.command("attempts", epilog=ATTEMPTS_EPILOG)(attempts)


@app.command("list", epilog=examples("purveyor subscription list", "purveyor subscription list --json"))
def list_(ctx: typer.Context, as_json: JsonFlag = False) -> None:
    """List the subscriptions."""
    cli = Cli.of(ctx, as_json)
    found = call(cli, lambda subscriptions: subscriptions.list_details())
    for each in found:
        if each["state"] == "unreadable":
            write_note(f"subscription {each['name']} is unreadable: {each['unreadable']}")
    if cli.json:
        write_json(found, indent=2)
        return
    rows = [
        (each["name"], topic_labels(each), describe_state(each), each["begin"], each["backlog"], prefill_summary(each))
        for each in found
    ]
    write(format_table(("NAME", "TOPICS", "STATE", "BEGINS AFTER", "BACKLOG", "PREFILL"), rows, wrap=("TOPICS",)))
    for each in found:
        if each.get("push_trouble"):
            write(describe_problem(each))


@app.command("show", epilog=examples("purveyor subscription show ox", "purveyor subscription show ox --json"))
def show(ctx: typer.Context, name: Name, as_json: JsonFlag = False) -> None:
    """Show a subscription: its definition, its position, and its backlog."""
    cli = Cli.of(ctx, as_json)
    found = call(cli, lambda subscriptions: subscriptions.details(name))
    write_json(found, indent=2) if cli.json else write(details_text(found))


@app.command("pause", epilog=examples("purveyor subscription pause ox"))
def pause(ctx: typer.Context, name: Name, as_json: JsonFlag = False) -> None:
    """Stop deliveries of a subscription until it is resumed; its queue still fills."""
    cli = Cli.of(ctx, as_json)
    call(cli, lambda subscriptions: subscriptions.pause(name))
    write_json({"name": name, "paused": True}) if cli.json else write(f"Paused {name}")


@app.command("resume", epilog=examples("purveyor subscription resume ox"))
def resume(ctx: typer.Context, name: Name, as_json: JsonFlag = False) -> None:
    """Resume deliveries; messages that its queue has refused are written now."""
    cli = Cli.of(ctx, as_json)
    behind = call(cli, lambda subscriptions: subscriptions.resume(name))
    if cli.json:
        write_json({"name": name, "paused": False, "catch_up_from": behind})
    else:
        write(f"Resumed {name}" + ("" if behind is None else f"; catching up from position {behind}"))


@app.command("prefill", epilog=examples("purveyor subscription prefill ox"))
def prefill_(ctx: typer.Context, name: Name, as_json: JsonFlag = False) -> None:
    """Request a failed prefill again."""
    cli = Cli.of(ctx, as_json)
    state = call(cli, lambda subscriptions: subscriptions.request_prefill(name))
    if cli.json:
        write_json({"name": name, **state})
    else:
        write(f"Prefill of {name}: {state['status']}, attempt {state['attempt']}, as of position {state['position']}")


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
    end = None if to is None else parse_replay_point(to)
    wanted = ReplayRange(begin=parse_replay_point(from_), end=end, topics=tuple(map(parse_topic, topic or [])))
    cli = Cli.of(ctx, as_json)
    job = call(cli, lambda subscriptions: subscriptions.replay(name, wanted))
    if cli.json:
        write_json({"kind": "replay", "name": name, "job": job, **wanted.to_json()})
    else:
        write(f"Replay of {name} from {escape(from_)} to {escape(to or 'now')} is requested (job {job})")


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
    call(cli, lambda subscriptions: subscriptions.delete(name, force=force))
    write_json({"name": name, "deleted": True}) if cli.json else write(f"Deleted {name}")
