"""A small port for Prometheus, for parts that have no HTTP of their own: the pipeline, push, an application's stages.

It answers `GET /metrics` and nothing else, on a thread of its own. A port that is taken does not stop the part: it is
tried again until it is free, so that a standby on the same machine gets it when it takes over.
"""

import contextlib
import http.server
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from typing import Final

from purveyor.app.telemetry.prometheus import CONTENT_TYPE, Reading, render

PATH: Final = "/metrics"
_log = logging.getLogger(__name__)
_AGAIN_SECONDS: Final = 1.0
_REQUEST_SECONDS: Final = 5.0

Read = Callable[[], Iterable[Reading]]


def _nothing() -> Iterable[Reading]:
    return ()


@contextlib.contextmanager
def exporting(port: int | None, read: Read = _nothing, *, host: str = "127.0.0.1") -> Iterator[None]:
    """Answer Prometheus as long as the block lasts; without a port, do nothing. `read` is called in another thread."""
    if port is None:
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_serve, args=(host, port, read, over), name="metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_REQUEST_SECONDS)


def _serve(host: str, port: int, read: Read, over: threading.Event) -> None:
    server = _bind(host, port, read, over)
    if server is None:
        return
    with server:
        while not over.is_set():
            server.handle_request()


def _bind(host: str, port: int, read: Read, over: threading.Event) -> "_Server | None":
    told = False
    while not over.is_set():
        try:
            return _Server((host, port), read)
        except OSError as error:
            if not told:
                _log.warning("metrics cannot be served at %s port %d yet: %s", host, port, error.strerror)
                told = True
        over.wait(_AGAIN_SECONDS)
    return None


class _Server(http.server.HTTPServer):
    """One request at a time: who asks too often waits."""

    timeout = 0.2

    def __init__(self, where: tuple[str, int], read: Read) -> None:
        self.read = read
        self.address_family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
        super().__init__(where, _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no news."""
        _log.debug("a request for metrics was not answered", exc_info=True)


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = _REQUEST_SECONDS
    server: _Server

    def do_GET(self) -> None:
        """The page, or that there is no other."""
        if self.path.partition("?")[0] != PATH:
            self.send_error(HTTPStatus.NOT_FOUND, f"there is only {PATH}")
            return
        page = render(self.server.read())
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the library's
        """Requests are not worth a line each."""
