"""What the demo runs on: all parts of `purveyor up` in an empty directory, and the commands a user would type."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import aiohttp

from purveyor.app.settings import Settings
from purveyor.app.static_logins import logins_of
from purveyor.app.up.managed_process import News
from purveyor.app.up.processes import API, PIPELINE, PROGRAM, Wanted, parts
from purveyor.app.up.supervisor import Supervisor
from purveyor.client.api_client import authorization
from purveyor.model.errors import ServerFailed

DEADLINE_SECONDS: Final = 300.0
_WORTH_TELLING: Final = ("ready", "died", "killed", "trouble")

Say = Callable[[str], None]


class StageSet:
    """The running system. Made by `running`."""

    def __init__(self, directory: Path, say: Say, supervisor: Supervisor, url: str) -> None:
        self.directory = directory
        self.say = say
        self.url = url
        self._supervisor = supervisor
        [admin] = [each for each in logins_of(Settings(data_dir=directory)).logins if each.role.value == "admin"]
        self._login = {"Authorization": authorization(admin.username, admin.password, None)}

    async def kill_pipeline(self) -> None:
        """Kill -9, as it happens to a machine that loses power; the supervisor starts it again."""
        pid = self._supervisor.pid(PIPELINE)
        if pid is None:
            raise ServerFailed("the pipeline is not running", fix="see logs/ in the directory of the demo")
        os.kill(pid, signal.SIGKILL)

    async def subscribe(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> None:
        """Add a subscription over HTTP."""
        async with session.post(f"{self.url}/v1/subscriptions", json=body, headers=self._login) as answer:
            if answer.status != 201:
                raise ServerFailed(f"{body['name']} was refused: {await answer.text()}")

    async def call(self, *words: str) -> dict[str, Any]:
        """A command of this program; what it says as JSON."""
        return await asyncio.to_thread(self._call, words)

    def _call(self, words: tuple[str, ...]) -> dict[str, Any]:
        done = subprocess.run(self._command(words), capture_output=True, text=True, env=environment(), check=False)
        return _said(words, done.stdout, done.stderr)

    @contextlib.asynccontextmanager
    async def following(self, path: Path) -> AsyncIterator[Callable[[], Awaitable[int]]]:
        """`purveyor import --follow` of a file that grows; yields what ends it and tells how many records it took."""
        words = ("import", str(path), "--source", "directory", "--follow", "--json")
        process = await asyncio.create_subprocess_exec(
            *self._command(words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
        )

        assert process.stderr is not None
        begun = await process.stderr.readline()  # it says that it follows: from here on Ctrl-C is its good end

        async def end() -> int:
            process.send_signal(signal.SIGINT)
            out, err = await process.communicate()
            return int(_said(words, out.decode(), (begun + err).decode())["added"])

        try:
            yield end
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    def _command(self, words: tuple[str, ...]) -> list[str]:
        return [*PROGRAM, "--data-dir", str(self.directory), *words]


def _said(words: tuple[str, ...], out: str, err: str) -> dict[str, Any]:
    if not out.strip():
        raise ServerFailed(f"`purveyor {' '.join(words)}` failed: {err.strip()}", fix="run it by hand")
    told: dict[str, Any] = json.loads(out)
    return told


@contextlib.asynccontextmanager
async def running(directory: Path, say: Say) -> AsyncIterator[StageSet]:
    """All parts, ready."""
    url = ""

    def tell(news: News) -> None:
        nonlocal url
        if news.part == API and news.event == "ready":
            url = str(news.more["url"])
        if news.event in _WORTH_TELLING:
            say(f"{news.event}: {news.part}" + (f": {news.detail}" if news.event != "ready" else ""))

    wanted = Wanted(options=("--data-dir", str(directory)), api=("--port", "0"))
    supervisor = Supervisor(parts(wanted), tell, environment=environment())
    async with supervisor.running():
        yield StageSet(directory, say, supervisor, url)


async def until(reached: Callable[[], bool], what: str) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not reached():
        if time.monotonic() > deadline:
            raise ServerFailed(f"{what}: nothing more comes", fix="see logs/ in the directory of the demo")
        await asyncio.sleep(0.1)


def environment() -> dict[str, str]:
    """Ours without settings of Purveyor: the demo is alone in its directory, and its endpoint is on this machine.

    Each JVM of it lives for a minute: what it would take to optimise code for hours is time taken from the demo.
    """
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PURVEYOR_")}
    java = f"{ours.get('SPARK_SUBMIT_OPTS', '')} -XX:TieredStopAtLevel=1".strip()
    return ours | {"PURVEYOR_PUSH_ALLOW": "127.0.0.0/8", "SPARK_SUBMIT_OPTS": java}
