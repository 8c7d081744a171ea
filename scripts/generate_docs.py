"""Write the pages that are made from code: `make docs`. A test holds them current."""

import sys
from pathlib import Path

from purveyor.queues.catalogue import Queue, internal_queues, reserved_names, stage_queue, subscription_queue
from scripts.reference_docs import reference_pages
from scripts.telemetry_docs import telemetry_pages

ROOT = Path(__file__).parent.parent
QUEUES_PAGE = Path("docs/reference/queues.md")

_HEAD = """\
# The queues

<!-- Made by `make docs` from src/purveyor/queues/catalogue.py: change it there. -->

Every queue is a JetStream stream `stream:<queue>` on file storage with no size limits, declared once in the catalogue.
Both its writer and its readers call `ensure` with that declaration when they start; whoever comes first creates the
stream and the readers' durables, and nothing can be written before they exist. `purveyor queues list` shows the live
state beside it. Limits that an operator sets on a live stream stay as they are.

"""


def queues_page() -> str:
    """The catalogue as a page."""
    examples = (subscription_queue("SUBSCRIPTION"), stage_queue("ENDPOINT", 2))
    parts = [
        _HEAD,
        _table((*internal_queues(), *examples)),
        "\n## Readers\n\n",
        _readers((*internal_queues(), *examples)),
    ]
    names = ", ".join(f"`{name}`" for name in sorted(reserved_names()))
    parts.append(
        "\n## Names\n\nA subscription's name is 1 to 64 letters, digits, `-` and `_`. It cannot be one of the internal "
        f"queues ({names}), nor begin with `stage-`.\n"
    )
    return "".join(parts)


def _table(queues: tuple[Queue, ...]) -> str:
    rows = [
        "| queue | what for | subjects | retention | writer | readers | order |",
        "|---|---|---|---|---|---|---|",
    ]
    for queue in queues:
        subjects = ", ".join(f"`{subject}`" for subject in queue.subjects)
        readers = ", ".join(f"`{reader.durable}`" for reader in queue.readers) or queue.other_readers
        rows.append(
            f"| {queue.name} | {queue.purpose} | {subjects} | {queue.retention.value} | {queue.writer} | {readers} "
            f"| {queue.order.value} |"
        )
    return "\n".join(rows) + "\n"


def _readers(queues: tuple[Queue, ...]) -> str:
    rows = ["| queue | durable | who | ack wait | in flight |", "|---|---|---|---|---|"]
    rows += [
        f"| {queue.name} | `{reader.durable}` | {reader.used_by} | {reader.ack_wait.total_seconds():.0f} s "
        f"| {reader.max_ack_pending if reader.max_ack_pending > 0 else 'no limit'} |"
        for queue in queues
        for reader in queue.readers
    ]
    return "\n".join(rows) + "\n\nOne in flight is a lock with a timeout: a second instance is a hot standby.\n"


def pages() -> dict[Path, str]:
    """Every generated page with its text."""
    return {QUEUES_PAGE: queues_page(), **reference_pages(), **telemetry_pages()}


def main() -> int:
    for path, text in pages().items():
        (ROOT / path).write_text(text)
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
