"""`purveyor doctor`: check this machine and this deployment, and print problems with their fixes."""

import asyncio
from collections import Counter

import typer

from purveyor.app.cli.context import Cli, JsonFlag, examples
from purveyor.app.cli.output import progress, write, write_json
from purveyor.app.cli.render import format_table
from purveyor.app.doctor.api_checks import check_api
from purveyor.app.doctor.deployment_checks import AskApi, check_pipeline, check_server
from purveyor.app.doctor.machine_checks import Finding, Weight, check_machine, is_wrong
from purveyor.app.ldap_settings import has_directories
from purveyor.app.settings import Settings
from purveyor.jetstream.address import Address
from purveyor.model.errors import PurveyorError

app = typer.Typer(
    help="Find problems of the installation, with their fixes.", rich_markup_mode=None, add_completion=False
)
_MAX_PATIENCE_SECONDS = 5.0


@app.command("doctor", epilog=examples("purveyor doctor", "purveyor --data-dir ./data doctor --json"))
def doctor(ctx: typer.Context, as_json: JsonFlag = False) -> None:
    """Check the machine, NATS, directories and checkpoints, and whether parts and subscriptions make progress.

    A process that exists is not enough: doctor asks the API at the address where it really listens, and compares the
    positions of the pipeline and the age of backlogs with the time.

    Each finding is `ok`, a `note`, a `warning` or `wrong`, with a fix. The command changes nothing. The exit code is 1
    if a finding is `wrong`.
    """
    cli = Cli.of(ctx, as_json)
    settings = cli.settings()
    with progress("checking"):
        findings = [*check_machine(settings), *check_api(settings), *asyncio.run(_server(cli, settings))]
        findings += asyncio.run(_directories(settings))
        findings += check_pipeline(settings, _api_asker(cli))
    if cli.json:
        write_json({"wrong": is_wrong(findings), "findings": findings}, indent=2)
    else:
        write(format_table(("", "ABOUT", "FOUND"), [(f.weight, f.about, _text(f)) for f in findings], wrap=("FOUND",)))
        write(f"\n{_summary(findings)}")
    if is_wrong(findings):
        raise typer.Exit(1)


async def _server(cli: Cli, settings: Settings) -> list[Finding]:
    def find(component: str | None) -> Address:
        return cli.address(component)

    return [finding async for finding in check_server(settings, find, patience_seconds=_patience(cli))]


async def _directories(settings: Settings) -> list[Finding]:
    if not has_directories(settings):
        return []
    from purveyor.app.doctor.ldap_checks import check_directories  # noqa: PLC0415 - most installations have none

    return [finding async for finding in check_directories(settings)]


def _api_asker(cli: Cli) -> AskApi | None:
    """Return a function that sends requests to the JetStream API; None if there is no server."""
    from purveyor.jetstream.bulk.net.pool import request_api  # noqa: PLC0415 - it brings Arrow

    try:
        address = cli.address()
    except PurveyorError:
        return None

    return lambda request: request_api(address, request, patience_seconds=_patience(cli))


def _patience(cli: Cli) -> float:
    return min(cli.root.timeout_seconds, _MAX_PATIENCE_SECONDS)


def _text(finding: Finding) -> str:
    return finding.text if finding.fix is None else f"{finding.text}. Fix: {finding.fix}"


def _summary(findings: list[Finding]) -> str:
    counts = Counter(finding.weight for finding in findings)
    parts = [f"{counts[weight]} {weight.value}" for weight in reversed(Weight) if counts[weight]]
    return ", ".join(parts)
