"""The program `purveyor`, also started by `python -m purveyor`: the command line, if its extra is installed.

This module needs the standard library only. Without the extra `app` it says what is installed, and which `pip install`
adds the rest.
"""

import sys
from collections.abc import Sequence

from purveyor import __version__
from purveyor.model.errors import MissingExtra
from purveyor.model.extras import install_line, missing_extra

_OVERVIEW = f"""\
Purveyor {__version__}: every change, to every subscriber, in order, once.

Installed are the Python packages purveyor.jetstream and purveyor.queues: a NATS JetStream client, and the queues of
Purveyor on it. {{missing}}.

  {install_line("all"):<40}  everything: `purveyor up`, `purveyor demo`
  {install_line("app"):<40}  the command line, the HTTP API, the console, the NATS server
  {install_line("spark"):<40}  Spark: the `jetstream` data source
  {install_line("stages"):<40}  transactional stages on PostgreSQL or SQLite
  {install_line("client"):<40}  purveyor.Consumer and Publisher: clients of the HTTP API
"""


def main() -> None:
    """Run the program with the arguments of the process."""
    try:
        from purveyor.app.cli.main import run  # noqa: PLC0415 - it needs the extra `app`
    except ModuleNotFoundError as error:
        missing = missing_extra(error, "The command line of Purveyor")
        if missing is None:
            raise
        sys.exit(_without_command_line(sys.argv[1:], missing))
    sys.exit(run(sys.argv[1:]))


def _without_command_line(arguments: Sequence[str], missing: MissingExtra) -> int:
    """Answer `--help` and `--version`; refuse everything else with the `pip install` that is missing."""
    if arguments[:1] == ["--version"]:
        sys.stdout.write(f"purveyor {__version__}\n")
        return 0
    if not arguments or {"--help", "-h"} & set(arguments):
        sys.stdout.write(_OVERVIEW.format(missing=missing.message))
        return 0
    sys.stderr.write(f"error: {missing.message}\nfix: {install_line('all')}\n")
    return 1


if __name__ == "__main__":
    main()
