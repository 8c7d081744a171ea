"""`purveyor doctor`: what is wrong with this machine or this deployment, and what to do about it."""

import asyncio
from collections import Counter

import typer

from purveyor.app.cli.context import Cli, JsonFlag, examples
from purveyor.app.cli.render import table, write, write_json
from purveyor.app.doctor.findings import Finding, Weight, is_wrong
from purveyor.app.doctor.machine_checks import look_at_machine
from purveyor.app.doctor.pipeline_checks import Ask, look_at_pipeline
from purveyor.app.doctor.server_checks import look_at_server
from purveyor.app.settings import Settings
from purveyor.jetstream.address import Address
from purveyor.model.errors import PurveyorError

app = typer.Typer(help="Look for what is wrong, and say what to do.", rich_markup_mode=None, add_completion=False)
_LONGEST_SECONDS = 5.0


@app.command("doctor", epilog=examples("purveyor doctor", "purveyor --data-dir ./data doctor --json"))
def doctor(ctx: typer.Context, as_json: JsonFlag = False) -> None:
    """Look at versions, Java, disk, ports, secrets, the NATS server, its clock and limits, and checkpoints.

    Each finding is `ok`, a `note`, a `warning` or `wrong`, with what to do about it. Nothing is changed. The exit code
    is 1 if something is wrong.
    """
    cli = Cli.of(ctx, as_json)
    settings = cli.settings()
    findings = [*look_at_machine(settings), *asyncio.run(_server(cli, settings))]
    findings += look_at_pipeline(settings, _asker(cli))
    if cli.json:
        write_json({"wrong": is_wrong(findings), "findings": findings}, indent=2)
    else:
        write(table(("", "ABOUT", "FOUND"), [(f.weight, f.about, _text(f)) for f in findings], wrap=("FOUND",)))
        write(f"\n{_summary(findings)}")
    if is_wrong(findings):
        raise typer.Exit(1)


async def _server(cli: Cli, settings: Settings) -> list[Finding]:
    def find(component: str | None) -> Address:
        return cli.address(component)

    return [finding async for finding in look_at_server(settings, find, patience_seconds=_patience(cli))]


def _asker(cli: Cli) -> Ask | None:
    """Return a way to ask the server; None if there is no server to ask."""
    from purveyor.jetstream.bulk.net.api_request import ask  # noqa: PLC0415 - it brings Arrow

    try:
        address = cli.address()
    except PurveyorError:
        return None

    return lambda question: ask(address, question, patience_seconds=_patience(cli))


def _patience(cli: Cli) -> float:
    return min(cli.root.timeout_seconds, _LONGEST_SECONDS)


def _text(finding: Finding) -> str:
    return finding.text if finding.fix is None else f"{finding.text}. To do: {finding.fix}"


def _summary(findings: list[Finding]) -> str:
    counts = Counter(finding.weight for finding in findings)
    told = [f"{counts[weight]} {weight.value}" for weight in reversed(Weight) if counts[weight]]
    return ", ".join(told)
