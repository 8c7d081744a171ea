"""The requests of a driver to the server: the state of the stream, the sequence of a time, and moves of the durable.

`StreamControl` sends the requests. When batches are done, the durable moves: at once, later, or while the next batch
runs. `Releases` decides how far it may move, `DurableMover` moves it.

To move a durable past a hundred thousand messages of an interest stream, the server needs about two microseconds for
each, in one thread. Spark waits for a commit before it begins the next batch, which needs nothing of that. So the mover
starts a long move in a thread and waits for it before the next one. The next start completes what a crash interrupts.
"""

import threading
import time
from collections import deque
from datetime import datetime
from typing import Any, Final

from purveyor.jetstream.api import format_time
from purveyor.jetstream.bulk.net.pool import request_api
from purveyor.jetstream.bulk.publish.session import is_migrating
from purveyor.jetstream.bulk.read.range_rows import covers, remove_covered
from purveyor.jetstream.config import AckPolicy, ConsumerConfig, Deliver, Retention, to_wire
from purveyor.model.errors import InvalidConfig, UnknownConsumer, UnknownMessage, UnknownStream
from purveyor.queues import sync_client
from purveyor.queues.migration.record import CONTINUES
from purveyor.queues.migration.recreate import durable_config
from purveyor.spark.checkpoint_files import CheckpointFiles
from purveyor.spark.offsets import Offset, SequenceRange, StreamView
from purveyor.spark.options import NamedOffset, OffsetSpec, ReadSettings

_RETRY_INTERVAL_SECONDS = 0.05
_FREED_PER_SECOND = 500
"""How many messages a server on a busy machine removes per second, at least; on an idle one half a million."""


class StreamControl:
    """The control requests of one reader. Picklable: connections belong to the process."""

    def __init__(self, settings: ReadSettings) -> None:
        self._settings = settings
        self._checkpoint = CheckpointFiles(settings.sync_checkpoint) if settings.sync_checkpoint else None

    def _request(self, question: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        settings = self._settings
        return request_api(settings.address, question, body, patience_seconds=settings.patience_seconds)

    def view(self) -> StreamView:
        """Return the stream as its leader sees it now."""
        info = self._info()
        state, config = info["state"], info["config"]
        return StreamView(
            name=self._settings.stream,
            created=str(info["created"]),
            first=int(state["first_seq"]),
            last=int(state["last_seq"]),
            messages=int(state["messages"]),
            drops_other_subjects=_retention(config) is not Retention.LIMITS and self._leaves_some_out(config),
            continues=_continues(config),
            sealed=bool(config.get("sealed")),
            subjects=tuple(config.get("subjects") or ()),
        )

    def _info(self) -> dict[str, Any]:
        """Return the stream; wait for it while it is away during its migration."""
        settings = self._settings
        give_up = time.monotonic() + settings.patience_seconds
        while True:
            try:
                return self._request(f"STREAM.INFO.{settings.stream}")
            except UnknownStream:
                away = is_migrating(settings.address, settings.stream)
                if time.monotonic() > give_up or not (away or self._is_back()):
                    raise
            time.sleep(_RETRY_INTERVAL_SECONDS)

    def _is_back(self) -> bool:
        try:
            self._request(f"STREAM.INFO.{self._settings.stream}")
        except UnknownStream:
            return False
        return True

    def drain(self, offset: Offset) -> None:
        """Report that everything in the sealed stream is done, and complete its migration if all readers have."""
        settings = self._settings
        self.move_durable(offset)
        sync_client.advance_migration(settings.address, settings.stream, settings.patience_seconds)

    def _leaves_some_out(self, config: dict[str, Any]) -> bool:
        """Return whether the stream takes subjects that the reader did not ask for."""
        wanted = self._settings.subjects
        taken = config.get("subjects") or ()
        return bool(wanted) and not all(any(covers(wide, one) for wide in wanted) for one in taken)

    def sequence_before(self, offset_spec: OffsetSpec, view: StreamView) -> int:
        """Return the last sequence before the offset where reading begins."""
        match offset_spec:
            case NamedOffset.EARLIEST:
                return view.begins - 1
            case NamedOffset.LATEST:
                return view.last
            case datetime():
                return self._first_at(offset_spec, view) - 1
            case _:
                return max(offset_spec - 1, 0)

    def sequence_until(self, offset_spec: OffsetSpec, view: StreamView) -> int:
        """Return the last sequence up to the offset where reading ends; a time itself is not included."""
        return min(offset_spec, view.last) if isinstance(offset_spec, int) else self.sequence_before(offset_spec, view)

    def _first_at(self, moment: datetime, view: StreamView) -> int:
        """Return the first sequence stored at or after a time; one past the end when there is none."""
        try:
            answer = self._request(f"STREAM.MSG.GET.{self._settings.stream}", {"start_time": format_time(moment)})
        except UnknownMessage:
            return view.last + 1
        return int(answer["message"]["seq"])

    def check_start(self, start: Offset, view: StreamView) -> None:
        """Raise InvalidConfig for a first start that would remove messages that no reader has read.

        A commit on a work queue removes everything before it. On other streams it removes nothing.
        """
        if self._settings.durable is None or start.sequence < view.begins:
            return
        if self._retention() is Retention.WORK_QUEUE and view.messages:
            raise InvalidConfig(
                f"option startingOffsets: stream {view.name!r} is a work queue, and with option durable the messages "
                f"{SequenceRange(view.begins, start.sequence)} would be removed unread",
                fix="leave startingOffsets at earliest, or read without durable",
            )

    def create_durable(self, start: Offset) -> None:
        """Create the durable if it does not exist, before the first batch.

        An interest stream keeps messages only for consumers.
        """
        durable, stream = self._settings.durable, self._settings.stream
        if durable is None:
            return
        subjects = remove_covered(self._settings.subjects)
        info = self._info()["config"]
        if info.get("sealed"):
            self._take_part(durable, subjects)
            if _retention(info) is Retention.WORK_QUEUE:
                return  # it takes no other consumer: its readers report their position
        try:
            found = self._request(f"CONSUMER.INFO.{stream}.{durable}")["config"]
        except UnknownConsumer:
            work_queue = self._retention() is Retention.WORK_QUEUE  # which only takes consumers that deliver all
            config = ConsumerConfig(
                durable_name=durable,
                name=durable,
                description="the position of a Spark query",
                deliver_policy=Deliver.ALL if work_queue else Deliver.BY_START_SEQUENCE,
                opt_start_seq=None if work_queue else start.sequence + 1,
                ack_policy=AckPolicy.EXPLICIT,
                filter_subjects=subjects or None,
            )
            body = {"stream_name": stream, "config": to_wire(config), "action": ""}
            body["config"].pop("backoff")
            self._request(f"CONSUMER.CREATE.{stream}.{durable}", body)
            return
        single = found.get("filter_subject")
        filters = tuple(found.get("filter_subjects") or ([single] if single else ()))
        if set(remove_covered(filters)) != set(subjects):
            raise InvalidConfig(
                f"durable {durable!r} of stream {stream!r} is for {', '.join(filters) or 'all subjects'}, "
                f"and the query reads {', '.join(subjects) or 'all subjects'}",
                fix="make option subjects the same, or name another durable",
            )

    def _take_part(self, durable: str, subjects: tuple[str, ...]) -> None:
        """Have the migration create the durable with the stream that follows the sealed one."""
        config = ConsumerConfig(
            durable_name=durable, description="the position of a Spark query", filter_subjects=subjects or None
        )
        settings = self._settings
        sync_client.join_migration(settings.address, settings.stream, durable_config(config), settings.patience_seconds)

    def move_durable(self, offset: Offset) -> None:
        """Let the stream drop the messages up to the offset, unless another consumer needs them.

        A checkpoint that is to be synced is flushed to the disk first. On an interest stream the move of the durable
        frees the messages; on a work queue it does not, so a purge follows. A move to where the durable is already, or
        to before, does nothing: a commit may be repeated.
        """
        durable, stream = self._settings.durable, self._settings.stream
        if durable is None:
            return
        info = self._info()
        if offset.created not in {str(info["created"]), *_continues(info["config"])}:
            return  # another stream of that name: nothing of it was read, and the next poll raises DataLost
        done = min(offset.sequence, int(info["state"]["last_seq"]))
        work_queue = _retention(info["config"]) is Retention.WORK_QUEUE
        if work_queue and info["config"].get("sealed"):
            self._sync()
            settings = self._settings  # a sealed stream refuses a purge
            sync_client.report_passed(settings.address, stream, durable, done, settings.patience_seconds)
            return
        floor = int(self._request(f"CONSUMER.INFO.{stream}.{durable}")["ack_floor"]["stream_seq"])
        if floor < done or work_queue:
            self._sync()
        if floor < done:
            self._free(done - floor, f"CONSUMER.RESET.{stream}.{durable}", {"seq": done + 1})
        if work_queue:
            for subject in self._settings.subjects or (">",):
                self._free(
                    int(info["state"]["messages"]), f"STREAM.PURGE.{stream}", {"seq": done + 1, "filter": subject}
                )

    def _free(self, messages: int, question: str, body: dict[str, Any]) -> None:
        """Send a request that removes messages, and give the server the time that a busy disk needs.

        A second request while the server works would only make it begin again.
        """
        seconds = max(self._settings.patience_seconds, messages / _FREED_PER_SECOND)
        request_api(self._settings.address, question, body, patience_seconds=seconds, answer_seconds=seconds)

    def _sync(self) -> None:
        if self._checkpoint is not None:
            self._checkpoint.sync()

    def floor(self) -> int | None:
        """Return the sequence up to which the durable has moved; None if there is no durable."""
        settings = self._settings
        if settings.durable is None:
            return None
        try:
            found = self._request(f"CONSUMER.INFO.{settings.stream}.{settings.durable}")
        except UnknownConsumer:
            return None
        return int(found["ack_floor"]["stream_seq"])

    def _retention(self) -> Retention:
        return _retention(self._info()["config"])


def _retention(config: dict[str, Any]) -> Retention:
    return Retention(config.get("retention", "limits"))


def _continues(config: dict[str, Any]) -> frozenset[str]:
    return frozenset(str((config.get("metadata") or {}).get(CONTINUES, "")).split())


LONG_MOVE_MESSAGES: Final = 10_000
"""A move past this many messages takes longer than the start of a batch."""
_FINISH_TIMEOUT_SECONDS: Final = 5.0


class Releases:
    """The batches that are done and whose messages the stream still keeps. Pure: the caller gives the time.

    A batch is released `hold_seconds` after it was done. While batches follow each other, at least `interval_seconds`
    lie between two releases: each costs requests to the server and, with a checkpoint to sync, writes to the disk.
    """

    def __init__(self, *, hold_seconds: float = 0.0, interval_seconds: float = 0.0) -> None:
        self._hold_seconds = hold_seconds
        self._interval_seconds = interval_seconds
        self._done: deque[tuple[float, Offset]] = deque()
        self._newest = 0
        self._released_at = -interval_seconds

    def add(self, offset: Offset, now: float) -> None:
        """Record that everything up to an offset is done. Repeated calls with one offset do nothing."""
        if offset.sequence > self._newest:
            self._done.append((now, offset))
            self._newest = offset.sequence

    @property
    def pending(self) -> bool:
        """Whether a batch is done and not released."""
        return bool(self._done)

    def give_back(self, offset: Offset, now: float) -> None:
        """Put back an offset that was due but to which the durable was not moved."""
        self._done.appendleft((now - self._hold_seconds, offset))

    def due(self, now: float, *, idle: bool = True, hold: bool = True) -> Offset | None:
        """Return the offset to which the durable is to move now; None if it is to stay.

        >>> releases = Releases(hold_seconds=10, interval_seconds=5)
        >>> for second in (1, 2, 3):
        ...     releases.add(Offset("s", "c", second), second)
        >>> [found and found.sequence for found in (releases.due(now, idle=False) for now in (10, 12, 13, 17))]
        [None, 2, None, 3]
        """
        if not idle and now < self._released_at + self._interval_seconds:
            return None
        found = None
        while self._done and (not hold or self._done[0][0] + self._hold_seconds <= now):
            found = self._done.popleft()[1]
        if found is not None:
            self._released_at = now
        return found


class DurableMover:
    """Moves the durable of one reader. A copy in another process has no move in progress."""

    def __init__(self, control: StreamControl) -> None:
        self._control = control
        self._move_thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def __reduce__(self) -> tuple[type["DurableMover"], tuple[StreamControl]]:
        return DurableMover, (self._control,)

    def move(self, offset: Offset) -> None:
        """Move the durable and wait until that is done."""
        self.settle()
        self._control.move_durable(offset)

    def begin(self, offset: Offset) -> None:
        """Start to move the durable. The next call of any method raises the error if the move fails."""
        self.settle()
        # A daemon: the end of the query does not wait for a server that is away.
        self._move_thread = threading.Thread(target=self._run, args=(offset,), name="purveyor-commit", daemon=True)
        self._move_thread.start()

    def is_moving(self) -> bool:
        """Return whether a move is in progress. Raise the error of one that failed."""
        if self._move_thread is not None and self._move_thread.is_alive():
            return True
        self.settle()
        return False

    def settle(self) -> None:
        """Wait for the move in progress, which has its own timeout; raise its error."""
        if self._move_thread is None:
            return
        self._move_thread.join()
        self._move_thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def end(self) -> None:
        """Give the move in progress a few seconds to complete."""
        if self._move_thread is not None:
            self._move_thread.join(_FINISH_TIMEOUT_SECONDS)

    def _run(self, offset: Offset) -> None:
        try:
            self._control.move_durable(offset)
        except BaseException as error:  # noqa: BLE001 - raised by the next call
            self._failure = error
