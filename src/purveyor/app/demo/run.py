"""The demo, step by step: all parts, an import, a subscriber from the start and a late one, an audit."""

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from purveyor.app.demo.consumer import Received, consume
from purveyor.app.demo.directory import Step, beginning, changes
from purveyor.app.up.keeper import News
from purveyor.app.up.parts import PROGRAM, Wanted, parts
from purveyor.app.up.supervisor import Supervisor
from purveyor.delivery.pull import Pull
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.model.errors import ServerFailed
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.queues.client import connect
from purveyor.queues.permissions import API
from purveyor.queues.server import running

PEOPLE = 1000
GROUPS = 20
_DEADLINE_SECONDS = 300.0
_WORTH_TELLING = ("ready", "died", "killed", "trouble")

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Result:
    """What happened. `wrong` is empty when all of it holds."""

    imported: int
    received: Sequence[Received]
    people: int
    audit: dict[str, Any]
    wrong: Sequence[str]


def run(directory: Path, say: Say, *, people: int = PEOPLE, groups: int = GROUPS) -> Result:
    """Run it on an empty directory."""

    def tell(news: News) -> None:
        if news.event in _WORTH_TELLING:
            say(f"{news.event}: {news.part}" + (f": {news.detail}" if news.event != "ready" else ""))

    async def on_all_parts() -> Result:
        wanted = Wanted(options=("--data-dir", str(directory)), api=("--port", "0"))
        async with Supervisor(parts(wanted), tell, environment=_environment()).running():
            return await _story(directory, say, beginning(people, groups))

    say("starting all parts; that of the pipeline on Spark takes longest")
    return asyncio.run(on_all_parts())


async def _story(directory: Path, say: Say, first: Step) -> Result:
    second = changes(first, 1)
    third = changes(second, 2)
    address = running(directory / "nats", API)
    assert address is not None
    async with connect(address, name="purveyor-demo") as queues, Pull(queues) as pull:
        subscriptions = Subscriptions(queues)
        await subscriptions.add(_subscription("everything", ".*"))
        all_events = first.events + second.events + third.events
        everything = asyncio.create_task(consume(pull, "everything", all_events, _DEADLINE_SECONDS))
        say(f"importing a directory of {len(first.people):,} people, then {second.events:,} changes")
        imported = 0
        for name, step in (("directory", first), ("changes-1", second)):
            imported += await asyncio.to_thread(_import, directory, name, step)
        # The late one begins behind everything imported so far, once that has become events.
        await _until(lambda: _reached(directory, "transform", imported), "the transform")
        say("adding a late subscriber, with prefill")
        await subscriptions.add(_subscription("people", "users/user", prefill=True))
        expected = len(second.people) + third.about_people
        late = asyncio.create_task(consume(pull, "people", expected, _DEADLINE_SECONDS))
        say(f"importing {third.events:,} more changes while it is filled")
        imported += await asyncio.to_thread(_import, directory, "changes-2", third)
        received = [await everything, await late]
    say("auditing every queue")
    audit = await asyncio.to_thread(_audit, directory)
    wrong = [
        *_check(received[0], all_events, 0, third),
        *_check(received[1], third.about_people, len(second.people), third),
    ]
    if not audit.get("clean"):
        wrong.append("the audit found differences")
    return Result(imported, received, len(third.people), audit, wrong)


def _subscription(name: str, topic: str, *, prefill: bool = False) -> Subscription:
    return Subscription(name=name, realms_topics=(RealmTopic("udm", topic),), request_prefill=prefill)


def _check(got: Received, live: int, prefill: int, final: Step) -> Iterator[str]:
    if got.live != live:
        yield f"{got.name} got {got.live} events instead of {live}"
    if got.prefill != prefill:
        yield f"{got.name} got {got.prefill} objects of prefill instead of {prefill}"
    if got.doubled or got.disordered:
        yield f"{got.name}: {got.doubled} doubled, {got.disordered} out of order"
    known = {key: (value.get("uid"), value["dn"]) for key, value in got.objects.items() if "uid=" in value["dn"]}
    if {person.uuid: (person.uid, person.dn) for person in final.people} != known:
        yield f"{got.name} knows other people than the directory has"


async def _until(reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while not reached():
        if time.monotonic() > deadline:
            raise ServerFailed(f"{what} is stuck", fix="see logs/ in the directory of the demo")
        await asyncio.sleep(0.2)


def _reached(directory: Path, part: str, position: int) -> bool:
    [path] = directory.glob("pipeline-status*.json")
    found = {told["part"]: told for told in json.loads(path.read_text())["parts"]}
    return int(found[part].get("position") or 0) >= position


def _import(directory: Path, name: str, step: Step) -> int:
    path = directory / f"{name}.ldif"
    path.write_text(step.ldif, encoding="utf-8")
    told = _call(directory, "import", str(path), "--source", "directory", "--json")
    return int(told["added"])


def _audit(directory: Path) -> dict[str, Any]:
    return _call(directory, "archive", "audit", "--json")


def _call(directory: Path, *words: str) -> dict[str, Any]:
    command = [*PROGRAM, "--data-dir", str(directory), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=_environment(), check=False)
    if not done.stdout.strip():
        raise ServerFailed(f"`purveyor {' '.join(words)}` failed: {done.stderr.strip()}", fix="run it by hand")
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PURVEYOR_")}
