"""`purveyor up`: everything on this machine, until it is told to stop."""

import asyncio
import signal
import sys
from typing import Annotated

import typer

from purveyor.app.cli.context import Cli, JsonFlag, examples
from purveyor.app.cli.render import write, write_json
from purveyor.app.cli.sanitize import safe
from purveyor.app.private_files import private_umask, tighten
from purveyor.app.settings import Settings
from purveyor.app.up.data_dir_lock import owning
from purveyor.app.up.managed_process import LOG, News
from purveyor.app.up.processes import NATS, Wanted, parts
from purveyor.app.up.supervisor import ALL, Supervisor

app = typer.Typer(help="Run everything on this machine.", rich_markup_mode=None, add_completion=False)
_INTERRUPTED = 130


@app.command(
    "up",
    epilog=examples(
        "purveyor up",
        "purveyor --data-dir ./data up --port 8080 --master 'local[2]'",
        "PURVEYOR_NATS_URL=nats://nats.example:4222 purveyor up --json",
    ),
)
def up(
    ctx: typer.Context,
    host: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Where the API listens; default: 127.0.0.1.")
    ] = None,
    port: Annotated[int | None, typer.Option(metavar="PORT", help="Of the API; default: 7777; 0: a free one.")] = None,
    master: Annotated[str | None, typer.Option(metavar="URL", help="The Spark master; default: local[*].")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Run everything on this machine: the NATS server (unless one is set), the pipeline, push and the HTTP API.

    Each part says when it is ready, and where. One that dies is started again. Ctrl-C or SIGTERM stops the API, then
    the pipeline, and the NATS server last; a second Ctrl-C stops at once. Passwords that are set nowhere are generated
    into files of the data directory, for their owner alone.
    """
    cli = Cli.of(ctx, as_json)
    settings = cli.settings(api_host=host, api_port=port, spark_master=master)
    flags = {"--host": host, "--port": port}
    wanted = Wanted(
        options=_before_the_command(cli),
        with_nats=settings.nats_url is None,
        pipeline=() if master is None else ("--master", master),
        push=_next_port(settings),
        api=tuple(word for flag, value in flags.items() if value is not None for word in (flag, str(value))),
    )
    _check(settings)
    ctx.with_resource(private_umask())
    tighten(settings.data_dir)
    with owning(settings.data_dir.absolute()):
        if asyncio.run(_serve(wanted, Teller(json=cli.json))):
            raise typer.Exit(_INTERRUPTED)


def _next_port(settings: Settings) -> tuple[str, ...]:
    """The pipeline answers Prometheus at the port that is set; push, on the same machine, at the one behind it."""
    return () if settings.metrics_port is None else ("--metrics-port", str(settings.metrics_port + 1))


async def _serve(wanted: Wanted, teller: "Teller") -> bool:
    """Until a signal; whether a second one came before all was stopped."""
    supervisor = Supervisor(parts(wanted), teller)
    signals = 0

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        teller(News(ALL, "stopping", "in order" if signals == 1 else "at once"))
        supervisor.stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    await supervisor.run()
    teller(News(ALL, "stopped", ""))
    return signals > 1


class Teller:
    """One line for each piece of news."""

    def __init__(self, *, json: bool) -> None:
        self._json = json

    def __call__(self, news: News) -> None:
        """Say it."""
        if news.event == LOG:
            sys.stderr.write(f"{news.detail}\n")
            sys.stderr.flush()
            return
        detail = "" if news.detail == f"the {news.part}" else news.detail or _detail(news)  # `stopped: the API`
        if self._json:
            # A part of the pipeline has a name of its own, which stands in its detail as well.
            write_json({**news.more, "event": news.event, "part": news.part, "detail": detail or None})
        elif detail.startswith(news.part):  # `ready: API at ...`
            write(f"{news.event}: {safe(detail)}")
        else:
            write(f"{news.event}: {news.part}{': ' if detail else ''}{safe(detail)}")


def _detail(news: News) -> str:
    """What a part that only has data to tell looks like to people."""
    if news.part == NATS and news.event == "ready":
        return f"{NATS} at {news.more['address']}, data and passwords in {news.more['data_directory']}"
    return ""


def _check(settings: Settings) -> None:
    """What the parts would refuse, told before any of them is started."""
    # Here and not at the top: a help page needs nothing of the API.
    from purveyor.app.http.server import check_tls  # noqa: PLC0415
    from purveyor.app.static_logins import check_logins  # noqa: PLC0415

    check_tls(settings.api_tls_cert, settings.api_tls_key)
    check_logins(settings)
    if settings.nats_address is None and settings.nats_server_tls is not None:
        settings.nats_server_tls.client.context()


def _before_the_command(cli: Cli) -> tuple[str, ...]:
    """The options that were given before `up`, for its parts. None of them is a secret: those are refused as flags."""
    words: list[str] = []
    for name, value in cli.root.flags.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    if cli.root.config is not None:
        words += ["--config", str(cli.root.config)]
    return tuple(words)
