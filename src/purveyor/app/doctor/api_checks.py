"""Checks of the API processes that run on the data directory, at the addresses where they really listen."""

import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from http import HTTPStatus
from typing import Final

from purveyor.app.doctor.machine_checks import Finding, ok, warning, wrong
from purveyor.app.doctor.observation import suspended_process
from purveyor.app.running_parts import API, RunningPart, known_parts
from purveyor.app.settings import Settings

_TIMEOUT_SECONDS: Final = 5.0
_MAX_BYTES: Final = 1 << 20


def check_api(settings: Settings) -> Iterator[Finding]:
    """Ask each API that runs on the data directory whether it can serve requests."""
    known = known_parts(settings.data_dir, API)
    asked: set[str | None] = set()
    for part in known:
        if part.is_alive and part.worker is None:
            yield _check_running(part)
        elif part.is_alive and (suspended := suspended_process(part.pid)) is not None:
            yield _suspended_worker(part, suspended)
        elif part.is_alive and part.url not in asked:  # any of the processes on a port answers
            yield _check_running(part)
            asked.add(part.url)
    if known and not any(part.is_alive for part in known):
        text = f"the API (process {known[0].pid}) ended unexpectedly"
        yield warning("api", text, "start `purveyor up` or `purveyor serve api`; under `up` it starts automatically")


def _check_running(part: RunningPart) -> Finding:
    try:
        status, answer = _get(f"{part.url}/readyz")
    except (OSError, ValueError, http.client.HTTPException):
        return _no_answer(part)
    if status is HTTPStatus.OK:
        return ok("api", f"the API answers at {part.url}")
    detail, fix = answer.get("detail"), answer.get("fix")
    return warning(
        "api",
        f"the API at {part.url} cannot serve requests: {detail or status.phrase}",
        f"it works again when the NATS server answers; {fix or 'see the findings about nats'}",
    )


def _suspended_worker(part: RunningPart, suspended: int) -> Finding:
    text = f"worker {part.worker} of the API at {part.url} (process {part.pid}) does not answer"
    return wrong("api", text, f"process {suspended} is suspended; continue it: `kill -CONT {suspended}`")


def _no_answer(part: RunningPart) -> Finding:
    text = f"the API (process {part.pid}) does not answer at {part.url}"
    suspended = suspended_process(part.pid)
    if suspended is not None:
        return wrong("api", text, f"process {suspended} is suspended; continue it: `kill -CONT {suspended}`")
    return wrong("api", text, f"it hangs. End it, and `up` starts a new one: `kill -9 {part.pid}`")


def _get(url: str) -> tuple[HTTPStatus, dict[str, object]]:
    # The certificate is for the name that clients use, not for this address of the same machine.
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS, context=context) as response:  # noqa: S310 - our URL
            status, body = HTTPStatus(response.status), response.read(_MAX_BYTES)
    except urllib.error.HTTPError as error:
        with error:
            status, body = HTTPStatus(error.code), error.read(_MAX_BYTES)
    answer = json.loads(body)
    return status, answer if isinstance(answer, dict) else {}
