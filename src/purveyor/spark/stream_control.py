"""What a driver asks and tells the server: the state of the stream, where a time is, how far the durable may move."""

import time
from datetime import datetime
from typing import Any

from purveyor.jetstream.bulk.net.api_request import ask
from purveyor.jetstream.bulk.publish.maintenance_lookup import migrating
from purveyor.jetstream.bulk.read.subject_filters import covers, without_covered
from purveyor.jetstream.codec import format_time, to_wire
from purveyor.jetstream.config import AckPolicy, ConsumerConfig, Deliver, Retention
from purveyor.model.errors import InvalidConfig, UnknownConsumer, UnknownMessage, UnknownStream
from purveyor.queues.migration import sync_client
from purveyor.queues.migration.record import CONTINUES
from purveyor.queues.migration.target_config import durable_config
from purveyor.spark.checkpoint_files import CheckpointFiles
from purveyor.spark.offsets import Offset, SequenceRange, StreamView
from purveyor.spark.options import Place, ReadSettings, Word

_AGAIN_SECONDS = 0.05
_FREED_PER_SECOND = 500
"""How many messages a server on a busy machine frees, at least; a quiet one frees half a million."""


class Control:
    """The control side of one reader. Picklable: links belong to the process, not to it."""

    def __init__(self, settings: ReadSettings) -> None:
        self._settings = settings
        self._checkpoint = CheckpointFiles(settings.sync_checkpoint) if settings.sync_checkpoint else None

    def _ask(self, question: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        settings = self._settings
        return ask(settings.address, question, body, patience_seconds=settings.patience_seconds)

    def view(self) -> StreamView:
        """The stream as its leader sees it now."""
        info = self._info()
        state, config = info["state"], info["config"]
        return StreamView(
            name=self._settings.stream,
            created=str(info["created"]),
            first=int(state["first_seq"]),
            last=int(state["last_seq"]),
            messages=int(state["messages"]),
            sheds_others=_retention(config) is not Retention.LIMITS and self._leaves_some_out(config),
            continues=_continues(config),
            sealed=bool(config.get("sealed")),
        )

    def _info(self) -> dict[str, Any]:
        """The stream; gone in the middle of its migration it is waited for."""
        settings = self._settings
        give_up = time.monotonic() + settings.patience_seconds
        while True:
            try:
                return self._ask(f"STREAM.INFO.{settings.stream}")
            except UnknownStream:
                away = migrating(settings.address, settings.stream)
                if time.monotonic() > give_up or not (away or self._is_back()):
                    raise
            time.sleep(_AGAIN_SECONDS)

    def _is_back(self) -> bool:
        try:
            self._ask(f"STREAM.INFO.{self._settings.stream}")
        except UnknownStream:
            return False
        return True

    def drain(self, offset: Offset) -> None:
        """The stream is sealed and everything in it is done: say so, and complete its migration if all have."""
        settings = self._settings
        self.move_durable(offset)
        sync_client.advance(settings.address, settings.stream, settings.patience_seconds)

    def _leaves_some_out(self, config: dict[str, Any]) -> bool:
        """Whether the stream takes subjects that the reader did not ask for."""
        asked = self._settings.subjects
        taken = config.get("subjects") or ()
        return bool(asked) and not all(any(covers(wide, one) for wide in asked) for one in taken)

    def sequence_before(self, place: Place, view: StreamView) -> int:
        """The last sequence that lies before a place where reading begins."""
        match place:
            case Word.EARLIEST:
                return view.begins - 1
            case Word.LATEST:
                return view.last
            case datetime():
                return self._first_at(place, view) - 1
            case _:
                return max(place - 1, 0)

    def sequence_until(self, place: Place, view: StreamView) -> int:
        """The last sequence that lies within a place where reading ends; a time ends before it."""
        return min(place, view.last) if isinstance(place, int) else self.sequence_before(place, view)

    def _first_at(self, moment: datetime, view: StreamView) -> int:
        """The first sequence stored at or after a time; one past the end when there is none."""
        try:
            answer = self._ask(f"STREAM.MSG.GET.{self._settings.stream}", {"start_time": format_time(moment)})
        except UnknownMessage:
            return view.last + 1
        return int(answer["message"]["seq"])

    def check_start(self, start: Offset, view: StreamView) -> None:
        """InvalidConfig for a first start that would throw away messages nobody has read.

        A commit on a work queue removes everything before it. Elsewhere, skipping is only skipping.
        """
        if self._settings.durable is None or start.sequence < view.begins:
            return
        if self._retention() is Retention.WORK_QUEUE and view.messages:
            raise InvalidConfig(
                f"option startingOffsets: stream {view.name!r} is a work queue, and with option durable the messages "
                f"{SequenceRange(view.begins, start.sequence)} would be removed unread",
                fix="leave startingOffsets at earliest, or read without durable",
            )

    def make_durable(self, start: Offset) -> None:
        """Make the durable if it is not there, before the first batch: an interest stream keeps nothing for nobody."""
        durable, stream = self._settings.durable, self._settings.stream
        if durable is None:
            return
        subjects = without_covered(self._settings.subjects)
        info = self._info()["config"]
        if info.get("sealed"):
            self._take_part(durable, subjects)
            if _retention(info) is Retention.WORK_QUEUE:
                return  # it has no room for another consumer: its readers say how far they are
        try:
            found = self._ask(f"CONSUMER.INFO.{stream}.{durable}")["config"]
        except UnknownConsumer:
            work_queue = self._retention() is Retention.WORK_QUEUE  # its consumers must deliver all
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
            self._ask(f"CONSUMER.CREATE.{stream}.{durable}", body)
            return
        single = found.get("filter_subject")
        filters = tuple(found.get("filter_subjects") or ([single] if single else ()))
        if set(without_covered(filters)) != set(subjects):
            raise InvalidConfig(
                f"durable {durable!r} of stream {stream!r} is for {', '.join(filters) or 'all subjects'}, "
                f"and the query reads {', '.join(subjects) or 'all subjects'}",
                fix="make option subjects the same, or name another durable",
            )

    def _take_part(self, durable: str, subjects: tuple[str, ...]) -> None:
        """Have the durable made with the stream that comes after the sealed one."""
        config = ConsumerConfig(
            durable_name=durable, description="the position of a Spark query", filter_subjects=subjects or None
        )
        settings = self._settings
        sync_client.join(settings.address, settings.stream, durable_config(config), settings.patience_seconds)

    def move_durable(self, offset: Offset) -> None:
        """Let the stream drop the messages up to the offset, which are done, unless another consumer needs them.

        If a checkpoint is to be synced, it is on the disk before. On an interest stream moving the durable frees the
        messages; a work queue frees nothing by that and is purged up to there.
        Moving to where it stands already, or is past, does nothing: a commit may be repeated.
        """
        durable, stream = self._settings.durable, self._settings.stream
        if durable is None:
            return
        info = self._info()
        if offset.created not in {str(info["created"]), *_continues(info["config"])}:
            return  # another stream of that name: nothing of it was read, and the next look tells the user
        done = min(offset.sequence, int(info["state"]["last_seq"]))
        work_queue = _retention(info["config"]) is Retention.WORK_QUEUE
        if work_queue and info["config"].get("sealed"):
            self._sync()
            settings = self._settings  # a purge is refused there
            sync_client.passed(settings.address, stream, durable, done, settings.patience_seconds)
            return
        floor = int(self._ask(f"CONSUMER.INFO.{stream}.{durable}")["ack_floor"]["stream_seq"])
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
        """Ask for something that removes messages, and leave the server the time that a busy disk needs for it.

        To ask again while the server is at it would only make it begin again.
        """
        seconds = max(self._settings.patience_seconds, messages / _FREED_PER_SECOND)
        ask(self._settings.address, question, body, patience_seconds=seconds, answer_seconds=seconds)

    def _sync(self) -> None:
        if self._checkpoint is not None:
            self._checkpoint.sync()

    def floor(self) -> int | None:
        """Return the sequence up to which the durable has moved; None if there is no durable."""
        settings = self._settings
        if settings.durable is None:
            return None
        try:
            found = self._ask(f"CONSUMER.INFO.{settings.stream}.{settings.durable}")
        except UnknownConsumer:
            return None
        return int(found["ack_floor"]["stream_seq"])

    def _retention(self) -> Retention:
        return _retention(self._info()["config"])


def _retention(config: dict[str, Any]) -> Retention:
    return Retention(config.get("retention", "limits"))


def _continues(config: dict[str, Any]) -> frozenset[str]:
    return frozenset(str((config.get("metadata") or {}).get(CONTINUES, "")).split())
