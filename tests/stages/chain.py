"""Three services, each a process with its own database: a flow goes down the chain and back, and ends at the top."""

import asyncio
import logging
import multiprocessing
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from purveyor.jetstream.address import Address
from purveyor.queues.client import Queues, connect
from purveyor.stages import Context, Request, SqlStore, Stages
from purveyor.stages.endpoint import Timing

SERVICES = 3
TIMING = Timing(ack_wait=timedelta(seconds=1), grace=timedelta(milliseconds=50))


@dataclass(frozen=True)
class Step:
    number: int
    path: str = ""


@dataclass
class Kept:
    number: int = -1


@dataclass(frozen=True)
class Service:
    address: Address
    database: str
    prefix: str
    place: int


def start(service: Service) -> multiprocessing.process.BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "tests.stages.program"])
    process = context.Process(target=_main, args=(service,), daemon=True)
    process.start()
    return process


def _main(service: Service) -> None:
    logging.disable(logging.CRITICAL)
    asyncio.run(_serve(service))


async def _serve(service: Service) -> None:
    async with connect(service.address) as queues:
        await application(queues, service).serve()


def application(queues: Queues, service: Service) -> Stages:
    stages = Stages(queues, store=SqlStore(service.database), app="chain", timing=TIMING)
    place, prefix = service.place, service.prefix
    endpoint = stages.endpoint(f"{prefix}.s{place}", request=Step, reply=Step, state=Kept)

    async def note(db: AsyncSession, number: int, what: str) -> None:
        await db.execute(text("INSERT INTO effects (number, note) VALUES (:n, :w)"), {"n": number, "w": what})

    if place < SERVICES - 1:
        below = stages.remote(f"{prefix}.s{place + 1}", request=Step, reply=Step)

        @endpoint.stage(exactly_once=True, concurrency=4)
        async def down(ctx: Context[Kept], step: Step, db: AsyncSession) -> Request[Step]:
            ctx.state.number = step.number
            await note(db, step.number, "down")
            return Request(below, Step(step.number, f"{step.path}>{place}"))

    @endpoint.last_stage(exactly_once=True, concurrency=4)
    async def up(ctx: Context[Kept], step: Step, db: AsyncSession) -> Step:
        assert ctx.state.number in (step.number, -1)
        await note(db, step.number, "up")
        return Step(step.number, f"{step.path}<{place}")

    if place == 0:
        done = stages.terminator(f"{prefix}.done", message=Step)

        @done.last_stage(exactly_once=True, concurrency=4)
        async def end(ctx: Context[None], step: Step, db: AsyncSession) -> None:
            await note(db, step.number, step.path)

    return stages
