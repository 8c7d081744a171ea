"""A healthy, busy system: `purveyor up`, a directory that changes, publishers, and a consumer of each subscription."""

import asyncio
import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import httpx

import purveyor
from purveyor.app.demo.system import initial_entries
from tests.support.command_line import PROGRAM
from tests.support.processes import environment
from tests.support.push import Site as Endpoint
from tests.support.running_api import PASSWORD, wanted
from tests.support.up_program import Up
from tests.support.waiting import PATIENCE_SECONDS

ADMIN = ("admin", "admin-secret")
_PEOPLE = 40
_PAUSE_SECONDS = 0.12
PULLED = {
    "access-control": {"delivery": "ordered"},
    "mail-server": {"delivery": "ordered"},
    "portal": {"delivery": "parallel"},
    "reporting": {"delivery": "parallel"},
}
PUSHED = "groupware"
ORDERS = {"realms_topics": [{"realm": "shop", "topic": "orders/.*"}]}


class BusySystem:
    """The system, with the traffic that keeps each of its arrows moving except that of prefill."""

    def __init__(self, home: Path) -> None:
        self.data_dir = home / "data"
        secrets = {
            "PURVEYOR_ADMIN_PASSWORD": ADMIN[1],
            "PURVEYOR_EVENTS_PASSWORD": "events-secret",
            "PURVEYOR_PUSH_ALLOW": "127.0.0.0/8",
        }
        self._stack = contextlib.ExitStack()
        self._ldif = home / "people.ldif"
        self._environment = environment(**secrets)
        self._home = home
        self._secrets = secrets

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.up = Up(self.data_dir, "--master", "local[2]", environment=self._secrets)
            stack.callback(self.up.close)
            self.endpoint = Endpoint()
            stack.callback(self.endpoint.stop)
            self.url: str = self.up.wait_for("ready", "API")["url"]
            self.up.wait_for("ready", "pipeline")
            self.admin = stack.enter_context(httpx.Client(base_url=self.url, auth=ADMIN, timeout=120, trust_env=False))
            self._subscribe()
            stack.enter_context(_Traffic(self.url, self._ldif))
            stack.enter_context(self._following())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _subscribe(self) -> None:
        push = {"endpoint": self.endpoint.url("/configured")}
        bodies = [
            wanted(PUSHED, delivery="push", push=push),
            *(wanted(name, **more) for name, more in PULLED.items()),
            wanted("billing", **ORDERS),
        ]
        for body in bodies:
            answer = self.admin.post("/v1/subscriptions", json=body)
            assert answer.status_code == 201, answer.text

    @contextlib.contextmanager
    def _following(self) -> Iterator[None]:
        self._ldif.write_text(initial_entries(_PEOPLE, 3).ldif)
        words = ("--data-dir", str(self.data_dir), "import", str(self._ldif), "--source", "directory", "--follow")
        with (self._home / "import.log").open("w") as log:
            process = subprocess.Popen([*PROGRAM, *words], env={**os.environ, **self._secrets}, stdout=log, stderr=log)
            try:
                yield
            finally:
                process.terminate()
                process.wait(PATIENCE_SECONDS)


class _Traffic:
    """Publishers and consumers in a thread with an event loop."""

    def __init__(self, url: str, ldif: Path) -> None:
        self._url, self._ldif = url, ldif
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="traffic")
        self._wrong: list[BaseException] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(PATIENCE_SECONDS)
        assert not self._wrong, self._wrong

    async def _run(self) -> None:
        work = [self._publish(), self._change(), *(self._consume(name) for name in (*PULLED, "billing"))]
        tasks = [asyncio.create_task(each) for each in work]
        end = asyncio.create_task(asyncio.to_thread(self._over.wait))
        await asyncio.wait([*tasks, end], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        self._wrong += [each for each in results if isinstance(each, Exception)]
        await end

    async def _consume(self, name: str) -> None:
        async with purveyor.Consumer(self._url, name, password=PASSWORD) as consumer:
            async for batch in consumer.batches():
                await batch.ack()

    async def _publish(self) -> None:
        """Publish changes of users and orders of a shop."""
        async with httpx.AsyncClient(
            base_url=self._url, auth=("events", "events-secret"), timeout=120, trust_env=False
        ) as client:
            for number in range(10**9):
                shop = number % 3 == 0
                event = {
                    "publisher_name": "shop" if shop else "hr",
                    "ts": "2026-01-01T12:00:00+00:00",
                    "realm": "shop" if shop else "udm",
                    "topic": "orders/order" if shop else "users/user",
                    "body": {"old": {}, "new": {"id": f"o-{number}"} if shop else {"uuid": f"u-{number % 200}"}},
                }
                (await client.post("/v1/messages", json=event)).raise_for_status()
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _change(self) -> None:
        """Append a change of a person to the file that `purveyor import --follow` reads."""
        for number in range(10**9):
            uid = f"user{number % _PEOPLE}"
            record = (
                f"\ndn: uid={uid},ou=people,dc=example,dc=org\nchangetype: modify\nreplace: mail\n"
                f"mail: {uid}.{number}@example.org\n-\n"
            )
            with self._ldif.open("a") as file:
                file.write(record)
            await asyncio.sleep(3 * _PAUSE_SECONDS)
