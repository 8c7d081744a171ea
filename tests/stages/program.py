"""An application with a stage in its own process, which kills itself at a chosen point of the steps."""

import asyncio
import logging
import multiprocessing
import os
import signal
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from purveyor.jetstream import bulk  # noqa: F401 - loaded once, before the fork
from purveyor.jetstream.address import Address
from purveyor.model.event import Event
from purveyor.queues.client import connect
from purveyor.stages import Context, Refuse, Retry, SqlStore, Stages
from purveyor.stages.crash_points import CrashPoint, set_listener
from purveyor.stages.endpoint import Timing

IN_HANDLER = "in the handler"
POINTS = (*(point.value for point in CrashPoint), IN_HANDLER)


@dataclass(frozen=True)
class Job:
    number: int
    poison: bool = False


@dataclass(frozen=True)
class Plan:
    """The behaviour of the process. `die_at` is a point, `after` the number of times that it passes it before."""

    address: Address
    database: str
    endpoint: str
    ordered: bool
    die_at: str | None = None
    after: int = 0


def start(plan: Plan) -> multiprocessing.process.BaseProcess:
    """Start a process; fast, because a fork server has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=main, args=(plan,), daemon=True)
    process.start()
    return process


def main(plan: Plan) -> None:
    logging.disable(logging.CRITICAL)
    asyncio.run(_serve(plan))


async def _serve(plan: Plan) -> None:
    left = plan.after

    def maybe_die(point: str) -> None:
        nonlocal left
        if point == plan.die_at:
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    set_listener(lambda point: maybe_die(point.value))
    async with connect(plan.address) as queues:
        await application(queues, plan, maybe_die).serve()


def job_event(job: Job, topic: str, key: str | None) -> Event:
    """Return the event that the handler publishes for a job."""
    return Event(
        publisher_name="crash", ts=datetime.now(UTC), realm="test", topic=topic, key=key, new={"number": job.number}
    )


def application(queues: Any, plan: Plan, maybe_die: Any) -> Stages:
    timing = Timing(ack_wait=timedelta(seconds=1), grace=timedelta(milliseconds=50))
    stages = Stages(queues, store=SqlStore(plan.database), app="crash", timing=timing)
    endpoint = stages.terminator(plan.endpoint, message=Job)
    sink = stages.remote(f"{plan.endpoint}-sink", request=Job, reply=type(None))
    delays = {"attempts": 2, "first_delay": timedelta(milliseconds=20)}
    retry = Retry.in_order(**delays) if plan.ordered else Retry.parallel(**delays)  # type: ignore[arg-type]

    @endpoint.last_stage(exactly_once=True, retry=retry, concurrency=4)
    async def handle(ctx: Context[None], job: Job, db: AsyncSession) -> None:
        await db.execute(text("INSERT INTO effects (number, note) VALUES (:n, :k)"), {"n": job.number, "k": ctx.key})
        ctx.send(sink, job)
        await ctx.publish(job_event(job, plan.endpoint, ctx.key))
        maybe_die(IN_HANDLER)
        if job.poison and job.number % 2:
            raise ValueError("a poisonous message")
        if job.poison:
            raise Refuse("a refused message")

    return stages
