"""A full data directory under a running `purveyor up`: clear errors, nothing lost, and all parts go on with room."""

import base64
import http.server
import json
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from tests.support.command_line import invoke
from tests.support.small_disk import SmallDisk, small_file_system
from tests.support.up_program import Up
from tests.support.waiting import PATIENCE_SECONDS, wait_until

SIZE = "400m"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_file_system(tmp_path / "disk", SIZE) as small:
        yield small


@pytest.fixture
def up(disk: SmallDisk) -> Iterator[Up]:
    program = Up(disk.path / "data", "--master", "local[2]", environment={"PURVEYOR_PUSH_ALLOW": "127.0.0.1"})
    yield program
    program.close()


class Publisher:
    """Publishes numbered events; a number that is refused is sent again."""

    def __init__(self, client: httpx.Client, auth: tuple[str, str]) -> None:
        self._client, self._auth = client, auth
        self.accepted: list[int] = []
        self.refused: list[httpx.Response] = []

    def publish(self) -> bool:
        number = len(self.accepted)
        event = {"publisher_name": "t", "ts": "2026-01-01T00:00:00Z", "realm": "udm", "topic": "users/user"}
        body = {"old": {}, "new": {"uuid": f"u-{number}", "number": number, "note": "x" * 100_000}}
        sent = self._client.post(
            "/v1/messages", json={**event, "body": body}, auth=self._auth, headers={"Idempotency-Key": str(number)}
        )
        if sent.status_code == 202:
            self.accepted.append(number)
            return True
        self.refused.append(sent)
        return False


class Consumer(threading.Thread):
    """Pulls and acknowledges over HTTP until it is stopped; notes each number it acknowledged."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self.stopped = threading.Event()
        self.acknowledged: list[int] = []
        self.names: set[str] = set()
        self.statuses: set[int] = set()

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60, auth=("ox", "oxpw")) as client:
            while not self.stopped.is_set():
                got = client.get("/v1/subscriptions/ox/messages/next?timeout=2")
                self.statuses.add(got.status_code)
                if got.status_code == 200 and got.json() is not None:
                    self._acknowledge(client, got.json())
                elif got.status_code != 200:
                    time.sleep(0.2)

    def _acknowledge(self, client: httpx.Client, message: dict[str, Any]) -> None:
        done = f"/v1/subscriptions/ox/messages/{message['sequence_number']}/status"
        while not self.stopped.is_set():
            answer = client.patch(done, json={"status": "ok"})
            self.statuses.add(answer.status_code)
            if answer.status_code == 200:
                new = message["body"]["new"]
                if "number" in new:
                    self.acknowledged.append(new["number"])
                self.names.add(str(new.get("dn")))
                return
            time.sleep(0.2)


class PushEndpoint:
    """An endpoint that accepts each push and remembers the numbers of the events."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        numbers = self.numbers

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                event = json.loads(base64.b64decode(sent["message"]["data"]))
                numbers.add(event["body"]["new"].get("number", -1))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                """Print nothing."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.mark.timeout(1200)
@pytest.mark.first
def test_a_full_disk_refuses_events_loses_none_and_all_parts_go_on_when_there_is_room(up: Up, disk: SmallDisk) -> None:
    api = up.wait_for("ready", "API")
    up.wait_for("up", "everything")
    passwords = tomllib.loads(Path(api["passwords"]).read_text())
    with ExitStack() as stack, httpx.Client(base_url=api["url"], timeout=60) as client:
        wanted: dict[str, Any] = {
            "name": "ox",
            "realms_topics": [{"realm": "udm", "topic": "users/user"}],
            "password": "oxpw",
        }
        added = client.post("/v1/subscriptions", json=wanted, auth=("admin", passwords["admin_password"]))
        assert added.status_code == 201
        publisher = Publisher(client, ("events", passwords["events_password"]))
        consumer = Consumer(api["url"])
        consumer.start()
        for _ in range(20):
            assert publisher.publish()
        endpoint = stack.enter_context(PushEndpoint())
        admin = ("admin", passwords["admin_password"])
        pushed = {**wanted, "name": "chat", "delivery": "push", "push": {"endpoint": endpoint.url}}
        assert client.post("/v1/subscriptions", json=pushed, auth=admin).status_code == 201
        assert publisher.publish()
        disk.fill()
        wait_until(lambda: not publisher.publish(), seconds=240)
        up.wait_for("full", "NATS")
        disk.clear()
        wait_until(publisher.publish, seconds=240)
        for _ in range(20):
            wait_until(publisher.publish, seconds=240)
        wait_until(lambda: len(consumer.acknowledged) >= len(publisher.accepted), seconds=240)
        # Push, archive, transform and prefill continue too.
        wait_until(lambda: endpoint.numbers >= set(publisher.accepted[20:]), seconds=240)
        ldif = disk.path / "people.ldif"
        ldif.write_text("dn: uid=ada,dc=example\nobjectClass: inetOrgPerson\nuid: ada\ncn: Ada\nsn: Lovelace\n")
        assert invoke("--data-dir", str(disk.path / "data"), "import", str(ldif)).code == 0
        wait_until(lambda: "uid=ada,dc=example" in consumer.names, seconds=240)
        late = {**wanted, "name": "late", "request_prefill": True}
        assert client.post("/v1/subscriptions", json=late, auth=admin).status_code == 201

        def prefilled() -> bool:
            found = client.get("/v1/subscriptions/late", auth=("late", "oxpw"))
            return bool(found.json()["prefill_queue_status"] == "done")

        wait_until(prefilled, seconds=240)
        first = client.get("/v1/subscriptions/late/messages/next?timeout=60", auth=("late", "oxpw")).json()
        assert first["body"]["new"]["uuid"] == "u-0"
        consumer.stopped.set()
        consumer.join(PATIENCE_SECONDS)
    assert consumer.acknowledged == publisher.accepted
    assert {each.status_code for each in publisher.refused} == {503}
    assert all(each.headers["Retry-After"] and "disk" in each.json()["fix"] for each in publisher.refused)
    assert consumer.statuses <= {200, 503}
    assert "room again" in {each["event"] for each in up.events if each["part"] == "NATS"}
    assert up.stop() == 0
