"""Trace two walks through the running system and list the source files in which a function runs.

    python -m scripts.trace_walks              print both lists
    python -m scripts.trace_walks --functions  print the functions of each file too
    python -m scripts.trace_walks --json       the same for programs

Walk 1, "event": one event goes from `POST /v1/messages` to the `PATCH … ok` of its consumer.
Walk 2, "push": one event is pushed to an endpoint, which answers 500; it is retried and becomes a dead letter.

The script starts `purveyor up` with a `sitecustomize` on the path that counts, in each Python process, the calls of
functions while a marker file exists. Module bodies, and functions that they call, do not count: Spark may start a
Python worker at any time, which imports everything. A file belongs to a walk if its functions are called more often
than in idle windows of the same length, so that background tasks (status, supervision) do not count.
"""

import argparse
import base64
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

WINDOW_SECONDS = 10.0
IDLE_WINDOWS = 5
NOISE_FACTOR = 1.3
"""A file that a background task calls is called a few times more or less from window to window."""
WRITE_SECONDS = 1.0
PARTS = ("api", "pipeline", "push")
START_TIMEOUT_SECONDS = 300.0
STEP_TIMEOUT_SECONDS = 120.0

Walk = dict[str, list[str]]
"""The files of a walk, each with the functions that are called more often than in an idle window."""

RECORDER = """
import collections, os, sys, threading
_folder = os.environ["PURVEYOR_TRACE_FOLDER"]
_root = os.environ["PURVEYOR_TRACE_ROOT"]
_recording = False
_calls = collections.Counter()

def _is_import(frame):
    while frame := frame.f_back:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(_root):
            return True
    return False

def _record(frame, event, argument):
    if _recording and event == "call":
        code = frame.f_code
        if code.co_name != "<module>" and code.co_filename.startswith(_root) and not _is_import(frame):
            _calls[f"{code.co_filename}:{code.co_qualname}"] += 1

def _part():
    arguments = [word.decode() for word in open("/proc/self/cmdline", "rb").read().split(bytes(1))]
    return arguments[arguments.index("serve") + 1] if "serve" in arguments else "worker"

def _poll():
    global _recording
    import json, time
    sys.setprofile(None)
    window = None
    while True:
        now = next((name[:-3] for name in os.listdir(_folder) if name.endswith(".on")), None)
        if now != window:
            if window is not None:
                _recording = False
                path = f"{_folder}/{window}.{_part()}.{os.getpid()}"
                with open(f"{path}.part", "w") as file:
                    json.dump(_calls, file)
                os.rename(f"{path}.part", path)
                _calls.clear()
            window = now
        _recording = window is not None
        time.sleep(0.02)

def _start():
    threading.Thread(target=_poll, daemon=True).start()
    threading.setprofile(_record)
    sys.setprofile(_record)

os.register_at_fork(after_in_child=_start)
_start()
"""


class Endpoint(http.server.BaseHTTPRequestHandler):
    """An endpoint of push that answers 500."""

    def do_POST(self) -> None:
        """Answer 500."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(500)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the base class
        """Print nothing."""


def by_file(calls: Counter[str]) -> Counter[str]:
    """Sum the calls of functions by file."""
    files: Counter[str] = Counter()
    for function, count in calls.items():
        files[function.partition(":")[0]] += count
    return files


class Installation:
    """A running `purveyor up` whose processes record what they call."""

    def __init__(self, home: Path, source: Path, port: int) -> None:
        self.home = home
        self.url = f"http://127.0.0.1:{port}"
        self.package = source / "purveyor"
        (home / "trace").mkdir()
        (home / "site").mkdir()
        (home / "site" / "sitecustomize.py").write_text(RECORDER, encoding="utf-8")
        (home / "purveyor.toml").write_text('push_allow = ["127.0.0.1"]\n', encoding="utf-8")
        environment = {
            **os.environ,
            "PYTHONPATH": f"{home / 'site'}{os.pathsep}{source}",
            "PURVEYOR_TRACE_FOLDER": str(home / "trace"),
            "PURVEYOR_TRACE_ROOT": str(self.package),
            "PURVEYOR_ADMIN_PASSWORD": "adminpw",
            "PURVEYOR_EVENTS_PASSWORD": "eventspw",
            "PURVEYOR_CONSOLE": "false",
        }
        command = [sys.executable, "-c", "from purveyor.app.cli import main; main()"]
        self.process = subprocess.Popen(
            [*command, "--data-dir", str(home / "data"), "up", "--port", str(port)],
            cwd=home,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        wait_until(lambda: any("all parts are ready" in line for line in self._lines), START_TIMEOUT_SECONDS)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)

    def request(self, method: str, path: str, login: str, body: Any = None) -> Any:
        """Send a request and return the JSON of its answer."""
        request = urllib.request.Request(f"{self.url}{path}", method=method)
        request.add_header("Authorization", "Basic " + base64.b64encode(login.encode()).decode())
        request.add_header("Content-Type", "application/json")
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(request, data, timeout=STEP_TIMEOUT_SECONDS) as answer:
            return json.load(answer)

    def subscribe(self, name: str, **options: Any) -> None:
        """Add a subscription to the topic of the same name."""
        topics = [{"realm": "walk", "topic": name}]
        body = {"name": name, "realms_topics": topics, "password": "pw", "request_prefill": False, **options}
        self.request("POST", "/v1/subscriptions", "admin:adminpw", body)

    def publish(self, topic: str) -> None:
        """Publish one event."""
        event = {
            "publisher_name": "walk",
            "ts": "2026-01-01T00:00:00+00:00",
            "realm": "walk",
            "topic": topic,
            "body": {"old": {}, "new": {"id": "1"}},
        }
        self.request("POST", "/v1/messages", "events:eventspw", event)

    def consume(self, name: str) -> None:
        """Fetch one message and acknowledge it."""
        path = f"/v1/subscriptions/{name}/messages"
        message = self.request("GET", f"{path}/next?timeout=60", f"{name}:pw")
        self.request("PATCH", f"{path}/{message['sequence_number']}/status", f"{name}:pw", {"status": "ok"})

    def record(self, window: str, seconds: float, action: Callable[[], None], parts: Sequence[str]) -> Counter[str]:
        """Run the action in a window of `seconds` and return how often each function was called in these parts."""
        folder = self.home / "trace"
        marker = folder / f"{window}.on"
        marker.touch()
        time.sleep(WRITE_SECONDS)  # until each process has seen it
        ends_at = time.monotonic() + seconds
        action()
        time.sleep(max(0.0, ends_at - time.monotonic()))
        marker.unlink()
        wait_until(lambda: all(any(folder.glob(f"{window}.{part}.*[0-9]")) for part in PARTS))
        time.sleep(WRITE_SECONDS)  # for the workers of Spark, whose number varies
        calls: Counter[str] = Counter()
        for path in folder.glob(f"{window}.*.*[0-9]"):
            if path.name.split(".")[1] in parts:
                calls.update(json.loads(path.read_text() or "{}"))
        return Counter({function.removeprefix(f"{self.package}/"): count for function, count in calls.items()})

    def walk(self, name: str, action: Callable[[], None], parts: Sequence[str]) -> Walk:
        """Return the files that are called more often while the action runs than in an idle window."""
        idle: Counter[str] = Counter()
        for number in range(IDLE_WINDOWS):
            idle |= self.record(f"idle-{name}-{number}", WINDOW_SECONDS, lambda: None, parts)
        busy = self.record(name, WINDOW_SECONDS, action, parts)
        often = {file for file, count in by_file(busy).items() if count > by_file(idle)[file] * NOISE_FACTOR}
        more = [function for function, count in sorted(busy.items()) if count > idle[function] * NOISE_FACTOR]
        return {
            file: [name for path, _, name in (function.partition(":") for function in more) if path == file]
            for file in sorted(often)
        }

    def stop(self) -> None:
        """Stop all parts."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)


def wait_until(condition: Callable[[], Any], seconds: float = STEP_TIMEOUT_SECONDS) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("a step of the walk did not end")
        time.sleep(0.05)


def trace(source: Path) -> dict[str, Walk]:
    """Run both walks on the code below `source` and return their files with their functions."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    endpoint = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    threading.Thread(target=endpoint.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as scratch:
        running = Installation(Path(scratch), source, port)
        try:
            running.subscribe("event")
            push = {"endpoint": f"http://127.0.0.1:{endpoint.server_address[1]}/", "ack_deadline_seconds": 10}
            retry = {"max_attempts": 2, "min_backoff_seconds": 1, "max_backoff_seconds": 1}
            running.subscribe("push", delivery="push", push=push, retry=retry)
            for topic in ("event", "push"):  # caches fill and Spark workers start before the recording
                running.publish(topic)
            running.consume("event")
            letters = "/v1/subscriptions/push/dead-letters"

            def dead_letters() -> int:
                return len(running.request("GET", letters, "push:pw")["dead_letters"])

            wait_until(lambda: dead_letters() == 1)

            def deliver_one() -> None:
                running.publish("event")
                running.consume("event")

            def push_one() -> None:
                before = dead_letters()
                running.publish("push")
                wait_until(lambda: dead_letters() > before)

            # The archive reads the same event, on a branch that does not lead to the consumer.
            found = running.walk("event", deliver_one, ("api", "pipeline", "worker"))
            event_files = {file: found[file] for file in found if not file.startswith("pipeline/archive/")}
            # The path up to the queue of the subscription is the one of the first walk.
            push_files = running.walk("push", push_one, ("push",))
        finally:
            running.stop()
            endpoint.shutdown()
    return {"event": event_files, "push": push_files}


def main() -> None:
    """Print the files of both walks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--functions", action="store_true", help="print the functions of each file too")
    parser.add_argument(
        "--source", type=Path, default=Path(__file__).parent.parent / "src", help="the folder of the code"
    )
    arguments = parser.parse_args()
    walks = trace(arguments.source.resolve())
    if arguments.json:
        print(json.dumps(walks, indent=2))
        return
    for name, files in walks.items():
        print(f"{name}: {len(files)} files")
        for file in files:
            print(f"  {file}")
            for function in files[file] if arguments.functions else ():
                print(f"      {function}")


if __name__ == "__main__":
    main()
