"""`python -m benchmarks [NAME ...]`: runs them on an embedded server, prints tables, writes RESULTS.md."""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks import (
    api,
    api_bulk,
    bulk,
    latency,
    ldap_live,
    ldap_source,
    ldap_state,
    ldif_import,
    migration,
    pipeline,
    push,
    spark,
    stages,
    takeover,
)
from benchmarks.report import RESULTS, Section, record, table
from purveyor.jetstream.address import Address
from purveyor.jetstream.server import EmbeddedServer, ServerOptions

BENCHMARKS: dict[str, Callable[[Address], list[Section]]] = {
    "bulk": bulk.run,
    "import": ldif_import.run,
    "ldap": ldap_source.run,
    "ldap-live": ldap_live.run,
    "ldap-state": ldap_state.run,
    "spark": spark.run,
    "spark-latency": spark.latency,
    "spark-start": spark.start_up,
    "dispatch": pipeline.dispatch,
    "growth": pipeline.growth,
    "dispatch-latency": pipeline.latency,
    "latency": latency.run,
    "prefill": pipeline.prefill,
    "takeover": takeover.run,
    "api": api.run,
    "api-bulk": api_bulk.run,
    "push": push.run,
    "push-idle": push.idle,
    "migration": migration.run,
    "stages": stages.run,
    "outbox": stages.large,
}


def main() -> None:
    arguments = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    arguments.add_argument("which", nargs="*", help=f"of {', '.join(BENCHMARKS)}; all by default")
    chosen = arguments.parse_args().which or list(BENCHMARKS)
    unknown = [name for name in chosen if name not in BENCHMARKS]
    if unknown:
        arguments.error(f"no benchmark {unknown[0]!r}: choose of {', '.join(BENCHMARKS)}")
    for name in chosen:
        with (
            tempfile.TemporaryDirectory() as directory,
            # As a server comes by default: synced every two minutes, not at each write. The peers get the same.
            EmbeddedServer(Path(directory) / "store", ServerOptions(sync="2m")) as server,
        ):
            sections = BENCHMARKS[name](server.address)
        for section in sections:
            print("\n" + table(section))
        record(sections)
    print(f"written to {RESULTS.relative_to(Path.cwd()) if RESULTS.is_relative_to(Path.cwd()) else RESULTS}")


if __name__ == "__main__":
    main()
