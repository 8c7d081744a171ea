"""An installation that tests of the whole pipeline feed, kill and check: its sources, its server and its pipeline."""

import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from pyspark.sql import SparkSession

from purveyor.jetstream.server import EmbeddedServer, RestartPolicy, ServerOptions
from purveyor.model.errors import Unavailable
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.pipeline.archive.layout import archived_until
from purveyor.pipeline.archive.reader import ArchiveSource
from purveyor.pipeline.audit.audit import audit
from purveyor.queues.permissions import component_users
from tests.pipeline.directory import Directory
from tests.pipeline.drained_state import check_log, check_prefill, check_queue, log_of
from tests.support.broker import Broker
from tests.support.command_line import PROGRAM, invoke
from tests.support.pipeline_program import Pipeline
from tests.support.processes import descendants, environment, kill, python_workers
from tests.support.waiting import wait_until

OLDER_BACKLOG = 40
PATIENCE_SECONDS = 900.0
"""Not a promise: a busy machine takes its time."""
SAFE = ServerOptions(
    sync="always", restart=RestartPolicy(max_deaths=1000, max_pause_seconds=0.2), users=component_users()
)
USERS = RealmTopic("udm", "users/user")
WIDE = Subscription(name="wide", realms_topics=(RealmTopic("udm", ".*"), RealmTopic("shop", "orders/.*")))
EXACT = Subscription(name="users", realms_topics=(USERS,))


class Installation:
    """A data directory with its server, the sources that write, and the pipeline that is killed and started again."""

    def __init__(
        self, server: EmbeddedServer, data: Path, random: Random, *, older: bool = False, master: str = "local[2]"
    ) -> None:
        self.server, self.data, self.random, self.master = server, data, random, master
        self.broker = Broker(server.address)
        self.directory = Directory(random)
        self.direct: list[str] = []
        self.file = data / "people.ldif"
        self.file.touch()
        self.pipelines: list[Pipeline] = []
        self.importing = subprocess.Popen(
            [*PROGRAM, "--data-dir", str(data), "import", str(self.file), "--follow"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment(),
        )
        if older:
            self.make_older_queue()
        self.start()

    @property
    def pipeline(self) -> Pipeline:
        return self.pipelines[-1]

    def start(self) -> None:
        self.pipelines.append(Pipeline(self.data, "--master", self.master))

    def run(self, *arguments: str, stdin: bytes = b"") -> None:
        """A command, as often as it takes: the server may be away for longer than a command waits."""

        def done() -> bool:
            outcome = invoke("--data-dir", str(self.data), "--timeout", "30s", *arguments, stdin=stdin)
            assert outcome.code in (0, 1), outcome
            return outcome.code == 0

        wait_until(done, seconds=PATIENCE_SECONDS)

    def add(self, wanted: Subscription) -> None:
        topics = [word for each in wanted.realms_topics for word in ("--topic", f"{each.realm}:{each.topic}")]
        fields = [f"{path}={value}" for path, values in wanted.filter.fields.items() for value in values]
        attributes = [f"{name}={value}" for name, values in wanted.filter.attributes.items() for value in values]
        filters = [word for each in fields for word in ("--filter-field", each)]
        filters += [word for each in attributes for word in ("--filter-attribute", each)]
        self.run(
            "subscription", "add", wanted.name, *topics, *filters, *(["--prefill"] if wanted.request_prefill else [])
        )

    def feed(self, changes: int, direct: int) -> None:
        """The directory changes, and others publish."""
        with self.file.open("a") as file:
            file.writelines(self.directory.change() for _ in range(changes))
        lines = [self._event() for _ in range(direct)]
        if lines:
            self.run("publish", "-", stdin="\n".join(lines).encode())

    def _event(self) -> str:
        number = len(self.direct)
        self.direct.append(f"order-{number}")
        obj = {"id": number % 50, "total": self.random.randrange(1000)}
        event = {
            "id": self.direct[-1],
            "realm": "shop",
            "topic": self.random.choice(("orders/order", "orders/refund")),
            "attributes": {"region": self.random.choice(("eu", "us"))},
            "body": {"old": obj, "new": {}} if self.random.random() < 0.2 else {"old": {}, "new": obj},
        }
        return json.dumps(event)

    def make_older_queue(self) -> None:
        """`incoming` as the older system made it: a work queue of one subject with one durable, and a backlog."""
        self.broker.make("stream:incoming", subjects=["incoming"], retention="workqueue", allow_direct=False)
        self.broker.durable("stream:incoming", "durable_name:incoming", max_ack_pending=1)
        for _ in range(OLDER_BACKLOG):
            self.publish_as_before(threading.Event())

    def publish_as_before(self, stop: threading.Event) -> None:
        """Publish one event as a foreign client: try until it is stored, or until the run stops."""
        event = {"publisher_name": "older", "ts": "2026-01-01T00:00:00Z", **json.loads(self._event())}
        identity = event.pop("id")
        message = ("incoming", json.dumps(event).encode(), None, identity)
        while True:
            try:
                self.broker.add("incoming", [message])
            except Unavailable:
                assert not stop.is_set(), "the queue takes no messages"
            else:
                return

    @contextmanager
    def older_publisher(self) -> Iterator[None]:
        """Publishes, one after the other, for the length of a block."""
        stop = threading.Event()

        def publish() -> None:
            while not stop.wait(0.05):
                self.publish_as_before(stop)

        thread = threading.Thread(target=publish)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def last(self, stream: str) -> int:
        return int(self.broker.state(f"stream:{stream}")["last_seq"])

    def wait_for_half(self) -> None:
        """Until so many events are there that a prefill finds something."""
        half = len(self.direct) + len(self.directory.expected) // 2
        wait_until(lambda: self.last("incoming") >= half, seconds=PATIENCE_SECONDS)

    def kill_something(self, what: str) -> bool:
        """kill -9 of one of them; whether there was something to kill."""
        match what:
            case "server":
                pid = self.server.pid
                return pid is not None and kill(pid)
            case "worker":
                workers = python_workers(self.pipeline.process.pid)
                return bool(workers) and kill(self.random.choice(workers))
            case "executor":
                executors = descendants(self.pipeline.process.pid, "CoarseGrainedExecutorBackend")
                return bool(executors) and kill(self.random.choice(executors))
            case _:
                self.pipeline.kill()
                self.start()
                return True

    def drained(self) -> bool:
        """Everything went all the way: in this order, because what leaves one queue is in the next before."""
        assert self.pipeline.process.poll() is None, (self.pipeline.lines, self.pipeline.err)
        if self.last("ldif") < len(self.directory.expected) or self.waiting("ldif"):
            return False
        last = self.last("incoming")
        dispatched = self.broker.floor("stream:incoming", "dispatcher")
        return dispatched >= last and archived_until(self.data / "archive") >= last and not self.waiting("prefill")

    def waiting(self, queue: str) -> int:
        return int(self.broker.state(f"stream:{queue}")["messages"])

    def drain(self) -> None:
        try:
            wait_until(self.drained, seconds=PATIENCE_SECONDS)
        except AssertionError:
            print(self.pipeline.status(), *self.pipeline.lines[-20:], sep="\n")
            raise
        self.pipeline.process.send_signal(signal.SIGTERM)
        assert (self.pipeline.ends(), self.pipeline.err) == (0, "")

    def close(self) -> None:
        for pipeline in self.pipelines:
            pipeline.close()
        self.importing.terminate()
        self.importing.wait(PATIENCE_SECONDS)

    def check(self, spark: SparkSession, subscriptions: tuple[Subscription, ...]) -> None:
        archive = self.data / "archive"
        last = self.last("incoming")
        log = log_of(archive)
        check_log(log, last, self.directory.expected, self.direct)
        held = {each.name: check_queue(self.broker, log, each) for each in subscriptions}
        filled = {each.name: check_prefill(self.broker, log, each) for each in subscriptions if each.request_prefill}
        print(f"live: {held}, prefilled: {filled}")
        assert all(held.values())
        assert all(filled.values())
        report = audit(spark, ArchiveSource(self.server.address, archive), 1, last)
        assert report.clean, report.to_json()
        assert {account.subscription for account in report.accounts} == {each.name for each in subscriptions}
        assert int(self.broker.state("stream:dead-letters")["messages"]) == 0
