"""What tests of pages need on the server: pipelines that report, messages, dead letters."""

import json
from datetime import UTC, datetime
from typing import Any

from purveyor.pipeline.job_failures import Failure
from purveyor.pipeline.part_status import PartProgress, PartStatus, State
from purveyor.queues.client import Queues
from purveyor.queues.dead_letters.letter import DeadLetter, park
from tests.support.console import Site


def part(name: str, state: State = State.RUNNING, *, error: str | None = None, **progress: Any) -> PartStatus:
    reported = (
        PartProgress(**progress)
        if progress
        else PartProgress(position=12, lag=0, rows=4, rows_per_second=80, batch=3, batch_ms=64)
    )
    failure = None if error is None else Failure(error)
    return PartStatus(
        name=name, state=state, since=datetime.now(UTC), progress=reported, error=failure, restarts=2 if error else 0
    )


def all_parts(**other: PartStatus) -> list[PartStatus]:
    return [other.get(name) or part(name) for name in ("transform", "dispatch", "archive", "prefill")]


def read_incoming(site: Site) -> None:
    """Move the durables of `incoming` past everything, as a pipeline does that works."""

    async def move(queues: Queues) -> None:
        last = (await queues.streams.info("stream:incoming")).state.last_seq
        for consumer in await queues.consumers.list("stream:incoming"):
            await queues.consumers.reset("stream:incoming", consumer.name, last + 1)

    site.on_server(move)


def messages(site: Site, queue: str) -> int:
    async def count(queues: Queues) -> int:
        return (await queues.streams.info(f"stream:{queue}")).state.messages

    return site.on_server(count)


def dead_letters(site: Site, name: str, count: int, reason: str, *, first: int = 0) -> None:
    """Letters of a subscription; those of one position are one letter."""

    async def work(queues: Queues) -> None:
        registered = site.admin.get(f"/v1/subscriptions/{name}")
        assert registered.status_code == 200
        stream = (await queues.streams.raw_info(f"stream:{name}"))["config"]
        incarnation = stream["metadata"]["purveyor.incarnation"]
        now = datetime.now(UTC)
        for number in range(first, first + count):
            letter = DeadLetter(
                reason=reason,
                origin=f"subscription:{name}",
                subject=f"{name}.main",
                data=json.dumps({"number": number, "name": name}).encode(),
                failed_first=now,
                failed_last=now,
                headers={"Purveyor-Position": (str(number + 1),), "Nats-Msg-Id": (f"{name}-{number}",)},
                position=number + 1,
                attempts=3,
                details={"subscription": name, "incarnation": incarnation, "position": number + 1},
            )
            await park(queues, letter)

    site.on_server(work)
