"""The metrics of the other processes on a data directory: the API includes their pages, so one address has all.

Under `purveyor up`, the pipeline and push serve their pages at free ports and announce them (`running_parts`), and so
do the processes that share the port of an API. A process that hangs, or that died and has not been started again, has
`purveyor_process_up` 0.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from purveyor.app.running_parts import RunningPart, known_parts
from purveyor.app.telemetry import metric_catalogue
from purveyor.app.telemetry.prometheus import MetricValues

_FRESH_SECONDS: Final = 1.0
_TIMEOUT_SECONDS: Final = 3.0


@dataclass(frozen=True, slots=True)
class PartPages:
    """The pages by the name of their process, and which processes answered."""

    up: MetricValues
    pages: Mapping[str, bytes]


class PartMetrics:
    """Reads the pages. Scrapes within a second share one result.

    An API process that shares its `url` with others includes their pages. Pages of other APIs are not included.
    """

    def __init__(self, data_dir: Path | None, url: str | None = None) -> None:
        self._data_dir = data_dir
        self._url = url
        self._lock = asyncio.Lock()
        self._found = PartPages(MetricValues(metric_catalogue.PROCESS_UP), {})
        self._found_at = float("-inf")

    async def read(self) -> PartPages:
        """Return the pages of all processes that answer."""
        async with self._lock:
            if self._data_dir is not None and time.monotonic() - self._found_at > _FRESH_SECONDS:
                self._found = await _collect(self._data_dir, self._url)
                self._found_at = time.monotonic()
            return self._found


async def _collect(data_dir: Path, url: str | None) -> PartPages:
    known = await asyncio.to_thread(known_parts, data_dir)
    parts = _names([each for each in known if each.worker is None or each.url == url])
    found = await asyncio.gather(*(_fetch(part) for part in parts.values()))
    pages = dict(zip(parts, found, strict=True))
    up = MetricValues(metric_catalogue.PROCESS_UP)
    for process, page in pages.items():
        up.add(page is not None, process)
    return PartPages(up, {process: page for process, page in pages.items() if page is not None})


def _names(parts: list[RunningPart]) -> dict[str, RunningPart]:
    """Return the processes with a page by name: `push`, and `push-2` for a second one. The oldest come first.

    A worker keeps the name of its number, such as `api-2`, when it is started again.
    """
    named: dict[str, RunningPart] = {}
    for part in reversed(parts):
        if part.worker is not None:
            named[worker_name(part.part, part.worker)] = part
        elif part.metrics_url is not None:
            number = sum(1 for each in named.values() if each.part == part.part) + 1
            named[part.part if number == 1 else f"{part.part}-{number}"] = part
    return named


def worker_name(part: str, worker: int) -> str:
    """Return the name of one of several processes that share a port, as in the label `process`."""
    return f"{part}-{worker}"


async def _fetch(part: RunningPart) -> bytes | None:
    """Return the page of a process; None if it does not answer."""
    url = urlsplit(part.metrics_url or "")
    if not part.is_alive or url.hostname is None:
        return None
    try:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            try:
                writer.write(f"GET {url.path} HTTP/1.0\r\n\r\n".encode())
                head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
            finally:
                writer.close()
    except (OSError, ValueError, TimeoutError):
        return None
    return body if head.partition(b"\r\n")[0].endswith(b"200 OK") else None
