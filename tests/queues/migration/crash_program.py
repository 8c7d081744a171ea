"""An instance in its own process: joins a migration, and kills itself at a given step.

`python -m tests.queues.migration.crash_program URL QUEUE STRATEGY ARCHIVES [STEP]`
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

from purveyor.jetstream.config import Retention
from purveyor.queues.client import Queues, connect
from purveyor.queues.migration.events import MigrationOptions, Step
from purveyor.queues.migration.plan import Strategy
from tests.support.migrations import declare_queue, finish_migration


def options(archives: Path, step: str | None = None) -> MigrationOptions:
    """Quick ones; at the step the process dies."""

    def reached(now: Step) -> None:
        if now.value == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return MigrationOptions(archives=archives, lease_seconds=1, grace_seconds=0.02, stuck_seconds=0.2, on_step=reached)


async def work(queues: Queues, stream: str, processed: Path) -> None:
    """Process messages: each is a line in a file, written before it is acknowledged."""
    async for message in queues.pull(stream, "reader"):
        with processed.open("ab") as file:
            file.write(message.data + b"\n")
        await message.ack(confirm=True)


async def main(url: str, name: str, strategy: Strategy, archives: Path, step: str | None) -> None:
    queue = declare_queue(name, Retention.INTEREST)
    async with connect(url, patience_seconds=60) as queues:
        migrations = queues.migrations.with_options(options(archives, step))
        working = asyncio.create_task(work(queues, queue.stream, archives / "processed"))
        if (await migrations.plan(queue)).needs_migration:
            await migrations.begin(queue, strategy=strategy)
        await finish_migration(migrations, queue)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


if __name__ == "__main__":
    url, name, strategy, archives, *step = sys.argv[1:]
    asyncio.run(main(url, name, Strategy(strategy), Path(archives), step[0] if step else None))
