"""Messages for tests of bulk publish, bulk read and the frame parser."""

from typing import Any

import numpy as np

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import (
    Outgoing,
    read_range,
)
from purveyor.jetstream.bulk.arrow_columns import Bytes
from purveyor.queues.client import Queues
from tests.support.bulk_servers import Proxy
from tests.support.waiting import wait_until


def rows(address: Address, stream: str) -> list[dict[str, Any]]:
    return [row for batch in read_range(address, stream, 1, 1 << 40) for row in batch.to_pylist()]


def numbered(subject: str, count: int, ids: str | None = None) -> list[Outgoing]:
    return [(subject, b"%d" % n, None, f"{ids}-{n}" if ids else None) for n in range(count)]


Message = tuple[bytes, int, bytes, bytes, bytes]  # subject, sid, reply, headers, payload


def array(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


def frame(message: Message) -> bytes:
    subject, sid, reply, headers, payload = message
    words = [b"HMSG" if headers else b"MSG", subject, b"%d" % sid]
    words += [reply] if reply else []
    words += [b"%d" % len(headers)] if headers else []
    words += [b"%d" % (len(headers) + len(payload))]
    return b" ".join(words) + b"\r\n" + headers + payload + b"\r\n"


def restore_after_failures(proxy: Proxy) -> None:
    """Restore the proxy after some connections have failed."""
    wait_until(lambda: proxy.refused >= 3)
    proxy.down = False


async def fill(queues: Queues, subject: str, count: int) -> None:
    for number in range(1, count + 1):
        await queues.publish(subject, f"order {number}".encode())
