"""The names of the headers that Purveyor adds to messages. The position is `jetstream.headers.POSITION`."""

from typing import Final

PARKED_POSITION: Final = "Purveyor-Parked-Position"
"""The position of a dead letter that was parked out of order; `append_once` ignores it."""
EVENT_ID: Final = "Purveyor-Id"
"""The id of the published event, on its copies in other queues."""
REPLAY_JOB: Final = "Purveyor-Replay"
"""The job that wrote a replayed message."""
DEAD_LETTER_SEQUENCE: Final = "Purveyor-Letter"
"""The sequence in `stream:dead-letters` of the dead letter that was redriven as this message."""
ORIGINAL_KIND: Final = "Purveyor-Came-On"
"""The original subject kind of a redriven message: `main`, `prefill`, or `none` if it never was in the queue."""
REDRIVE_COUNT: Final = "Purveyor-Retries"
"""How often a message was redriven."""
FIRST_FAILED_AT: Final = "Purveyor-Failed-First"
"""When a redriven message failed for the first time."""
