"""How an idle reader waits for the next message: for a signal of the server, and by polling where none can come.

The reader subscribes to the subjects of its stream, and the server ends each subscription with its first message. So a
busy stream sends nothing here, and an idle one sends one message, at about the time at which it is stored.

The signal is best effort. It does not come if the user may not subscribe, for streams that copy another stream, and
when the connection breaks. So the reader polls in any case, and more often where no signal can come.
"""

import logging
import time
from collections.abc import Sequence
from typing import Final

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk.net.connection import BulkConnection
from purveyor.jetstream.bulk.net.frame_parser import parse_message_lines
from purveyor.jetstream.bulk.net.pool import RetryDeadline, connect
from purveyor.model.errors import PermissionDenied, PurveyorError

_log = logging.getLogger(__name__)
_RECONNECT_SECONDS: Final = 5.0
_SIGNAL_POLL_SECONDS: Final = 0.25
"""The pause between two polls where a signal ends it."""
_STORING_POLL_SECONDS: Final = 0.001
"""The first pause after a signal, which may come before the message is stored. Each pause is twice as long."""
_LONGEST_STORING_POLL_SECONDS: Final = 0.064
_SHORTEST_POLL_SECONDS: Final = 0.004
_IDLE_POLL_SECONDS: Final = 0.03
_LONGEST_POLL_SECONDS: Final = 0.1
_POLL_GROWTH: Final = 1.5


class ArrivalWait:
    """The pauses of one reader between two looks at the stream."""

    def __init__(self, address: Address) -> None:
        self._signal = ArrivalSignal(address)
        self._storing_seconds: float | None = None
        self._poll_seconds = _SHORTEST_POLL_SECONDS

    def pause(self, subjects: Sequence[str], at_most_seconds: float) -> None:
        """Pause until a message may be there."""
        if self._storing_seconds is not None:
            time.sleep(min(self._storing_seconds, at_most_seconds))
            doubled = 2 * self._storing_seconds
            self._storing_seconds = doubled if doubled <= _LONGEST_STORING_POLL_SECONDS else None
            return
        if not self._signal.arm(subjects):
            time.sleep(min(self._poll_seconds, at_most_seconds))
            self._poll_seconds = min(self._poll_seconds * _POLL_GROWTH, _LONGEST_POLL_SECONDS)
            return
        # The first look after a new subscription is soon.
        seconds = _SHORTEST_POLL_SECONDS if self._signal.was_armed_now else _SIGNAL_POLL_SECONDS
        if self._signal.wait(min(seconds, at_most_seconds)):
            self._storing_seconds = _STORING_POLL_SECONDS

    def found(self) -> None:
        """Record that messages were there: the next ones may follow at once."""
        self._storing_seconds = None
        self._poll_seconds = _SHORTEST_POLL_SECONDS

    def found_nothing(self) -> None:
        """Record that no message came for as long as the reader waits."""
        self._poll_seconds = _IDLE_POLL_SECONDS

    def close(self) -> None:
        """Close the connection of the signal."""
        self._signal.close()


class ArrivalSignal:
    """The signal of one reader. A copy in another process has no connection."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._connection: BulkConnection | None = None
        self._armed: dict[int, str] = {}
        self.was_armed_now = False
        """Whether the last call of `arm` made a subscription: a message may have come just before it."""
        self._refused = False
        self._connect_at = 0.0

    def __reduce__(self) -> tuple[type["ArrivalSignal"], tuple[Address]]:
        return ArrivalSignal, (self._address,)

    def is_armed(self, subjects: Sequence[str]) -> bool:
        """Return whether the server will report the next message on each subject, as far as this side knows."""
        return self._connection is not None and set(subjects) <= set(self._armed.values())

    def arm(self, subjects: Sequence[str]) -> bool:
        """Ask for the next message on each subject; return False if no signal can come now."""
        if self._refused or not subjects:
            return False
        try:
            connection = self._open()
            if connection is None:
                return False
            while connection.pump(0.0):
                self._receive(connection)  # what came while the last batch ran
            self._receive(connection)
            missing = set(subjects) - set(self._armed.values())
            self.was_armed_now = bool(missing)
            for subject in missing:
                sid = connection.subscribe(subject)
                connection.unsubscribe(sid, after_messages=1)
                self._armed[sid] = subject
            connection.flush()
        except PurveyorError as error:
            self._give_up(error)
            return False
        return True

    def wait(self, seconds: float) -> bool:
        """Wait for a message; return whether one came. Without a connection it only waits."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            connection = self._connection
            if connection is None:
                time.sleep(left)
                break
            try:
                connection.pump(left)
                if self._receive(connection):
                    return True
            except PurveyorError as error:
                self._give_up(error)
        return False

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self._armed.clear()

    def _open(self) -> BulkConnection | None:
        if self._connection is None and time.monotonic() >= self._connect_at:
            self._connect_at = time.monotonic() + _RECONNECT_SECONDS
            self._connection = connect(self._address, RetryDeadline(0.0))
        return self._connection

    def _receive(self, connection: BulkConnection) -> bool:
        came = False
        while len(frames := connection.receive()):
            for sid in parse_message_lines(frames).sids.tolist():
                came |= self._armed.pop(sid, None) is not None
        return came

    def _give_up(self, error: PurveyorError) -> None:
        """Go on without a signal: for ever if the user may not subscribe, else until the next connection."""
        self._refused = isinstance(error, PermissionDenied)
        _log.log(logging.INFO if self._refused else logging.DEBUG, "the reader polls for new messages: %s", error)
        self.close()
