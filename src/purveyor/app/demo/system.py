"""The system of the demo: all parts of `purveyor up` in an empty directory, commands of the program, and sample data.

The sample data is a small directory: its entries and changes as LDIF, and its people after each step. Nothing is
random: two runs import the same bytes.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import aiohttp

from purveyor.app.settings import Settings
from purveyor.app.static_logins import load_logins
from purveyor.app.up.supervisor import API, PIPELINE, PROGRAM, PartEvent, Supervisor, UpOptions, make_parts
from purveyor.client.api_client import authorization_header
from purveyor.model.errors import ServerFailed

DEADLINE_SECONDS: Final = 300.0
_PRINTED_EVENTS: Final = ("ready", "died", "killed", "problem")

Print = Callable[[str], None]


class DemoSystem:
    """The running system; `run_system` starts it."""

    def __init__(self, directory: Path, print_line: Print, supervisor: Supervisor, url: str) -> None:
        self.directory = directory
        self.print_line = print_line
        self.url = url
        self._supervisor = supervisor
        [admin] = [each for each in load_logins(Settings(data_dir=directory)).logins if each.role.value == "admin"]
        self._login = {"Authorization": authorization_header(admin.username, admin.password, None)}

    async def kill_pipeline(self) -> None:
        """Kill the pipeline with SIGKILL; the supervisor restarts it."""
        pid = self._supervisor.pid(PIPELINE)
        if pid is None:
            raise ServerFailed("the pipeline is not running", fix="see logs/ in the directory of the demo")
        os.kill(pid, signal.SIGKILL)

    async def subscribe(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> None:
        """Add a subscription over HTTP."""
        async with session.post(f"{self.url}/v1/subscriptions", json=body, headers=self._login) as answer:
            if answer.status != 201:
                raise ServerFailed(f"{body['name']} was refused: {await answer.text()}")

    async def call(self, *words: str) -> Any:
        """Run a command of this program, and return its JSON."""
        return await asyncio.to_thread(self._call, words)

    def _call(self, words: tuple[str, ...]) -> Any:
        done = subprocess.run(self._command(words), capture_output=True, text=True, env=environment(), check=False)
        return _parse_output(words, done.stdout, done.stderr)

    @contextlib.asynccontextmanager
    async def following(self, path: Path) -> AsyncIterator[Callable[[], Awaitable[int]]]:
        """Run `purveyor import --follow`; yield a function that ends it and returns the number of imported records."""
        words = ("import", str(path), "--source", "directory", "--follow", "--json")
        process = await asyncio.create_subprocess_exec(
            *self._command(words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
        )

        assert process.stderr is not None
        first_line = await process.stderr.readline()  # `Following ...`: from here on Ctrl-C is its normal end

        async def end() -> int:
            process.send_signal(signal.SIGINT)
            out, err = await process.communicate()
            return int(_parse_output(words, out.decode(), (first_line + err).decode())["added"])

        try:
            yield end
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    def _command(self, words: tuple[str, ...]) -> list[str]:
        return [*PROGRAM, "--data-dir", str(self.directory), *words]


def _parse_output(words: tuple[str, ...], out: str, err: str) -> Any:
    if not out.strip():
        raise ServerFailed(f"`purveyor {' '.join(words)}` failed: {err.strip()}", fix="run it by hand")
    return json.loads(out)


@contextlib.asynccontextmanager
async def run_system(directory: Path, print_line: Print) -> AsyncIterator[DemoSystem]:
    """Start all parts, and yield the system when they are ready."""
    url = ""

    def on_event(event: PartEvent) -> None:
        nonlocal url
        if event.part == API and event.event == "ready":
            url = str(event.fields["url"])
        if event.event in _PRINTED_EVENTS:
            print_line(f"{event.event}: {event.part}" + (f": {event.detail}" if event.event != "ready" else ""))

    options = UpOptions(options=("--data-dir", str(directory)), api=("--port", "0"))
    supervisor = Supervisor(make_parts(options), on_event, environment=environment())
    async with supervisor.running():
        yield DemoSystem(directory, print_line, supervisor, url)


async def wait_until(reached: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds; raise ServerFailed after the deadline."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not reached():
        if time.monotonic() > deadline:
            raise ServerFailed(
                f"{what}: no progress within {DEADLINE_SECONDS:g} s", fix="see logs/ in the directory of the demo"
            )
        await asyncio.sleep(0.1)


def environment() -> dict[str, str]:
    """Return our environment without settings of Purveyor; allow pushes to this machine.

    Each JVM of the demo lives for a minute: it skips the compiler optimisations that pay off after hours.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PURVEYOR_")}
    java = f"{inherited.get('SPARK_SUBMIT_OPTS', '')} -XX:TieredStopAtLevel=1".strip()
    ours = {"PURVEYOR_PUSH_ALLOW": "127.0.0.0/8", "PURVEYOR_MAPPING": "udm"}
    return inherited | ours | {"SPARK_SUBMIT_OPTS": java}


_BASE = "dc=example,dc=org"
_PEOPLE = f"ou=people,{_BASE}"
_GROUPS = f"ou=groups,{_BASE}"
_FIRST = ("Ada", "Alan", "Barbara", "Edsger", "Frances", "Grace", "Katherine", "Leslie", "Margaret", "Tim")
_LAST = ("Allen", "Dijkstra", "Hamilton", "Hopper", "Johnson", "Lamport", "Liskov", "Lovelace", "Turing", "Lee")


@dataclass(frozen=True, slots=True)
class Person:
    """An entry of a person; the number never changes."""

    number: int
    uid: str
    mail: str

    @property
    def dn(self) -> str:
        """Return the distinguished name."""
        return f"uid={self.uid},{_PEOPLE}"

    @property
    def uuid(self) -> str:
        """Return the identity, which never changes."""
        return f"10000000-0000-4000-8000-{self.number:012d}"


@dataclass(frozen=True, slots=True)
class Step:
    """A batch of records: LDIF, number of events, number of events about people, and the people after it."""

    ldif: str
    events: int
    about_people: int
    people: tuple[Person, ...]


def initial_entries(people: int, groups: int) -> Step:
    """Return the entries at the start."""
    made = tuple(Person(number, f"user{number}", f"user{number}@example.org") for number in range(people))
    records = [
        f"dn: {_BASE}\nobjectClass: domain\ndc: example\n",
        f"dn: {_PEOPLE}\nobjectClass: organizationalUnit\nou: people\n",
        f"dn: {_GROUPS}\nobjectClass: organizationalUnit\nou: groups\n",
        *(_content(person) for person in made),
        *(_group(number, made) for number in range(groups)),
    ]
    return Step("\n".join(records), len(records), people, made)


def changes(before: Step, round_: int) -> Step:
    """Return changes: every third person gets a new address, every seventh a new name, every eleventh is deleted."""
    records, left = [], []
    for person in before.people:
        now = person
        if person.number % 3 == round_ % 3:
            now = replace(now, mail=f"{person.uid}.{round_}@example.org")
            records.append(f"dn: {now.dn}\nchangetype: modify\nreplace: mail\nmail: {now.mail}\n-\n")
        if person.number % 7 == round_ % 7:
            renamed = replace(now, uid=f"{now.uid}-{round_}")
            records.append(f"dn: {now.dn}\nchangetype: modrdn\nnewrdn: uid={renamed.uid}\ndeleteoldrdn: 1\n")
            now = renamed
        if person.number % 11 == round_ % 11:
            records.append(f"dn: {now.dn}\nchangetype: delete\n")
        else:
            left.append(now)
    return Step("\n".join(records), len(records), len(records), tuple(left))


def _content(person: Person) -> str:
    first, last = _FIRST[person.number % len(_FIRST)], _LAST[person.number // len(_FIRST) % len(_LAST)]
    return (
        f"dn: {person.dn}\nobjectClass: inetOrgPerson\nuid: {person.uid}\ncn: {first} {last}\nsn: {last}\n"
        f"givenName: {first}\nmail: {person.mail}\nentryUUID: {person.uuid}\n"
    )


def _group(number: int, people: tuple[Person, ...]) -> str:
    members = "".join(f"member: {person.dn}\n" for person in people if person.number % 10 == number % 10)
    return f"dn: cn=group{number},{_GROUPS}\nobjectClass: groupOfNames\ncn: group{number}\n{members}"
