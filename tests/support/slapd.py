"""A real slapd for tests: a child on a free loopback port, with its configuration and database in one directory."""

import base64
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from purveyor.jetstream.server.server_checks import free_port
from scripts.slapd import find_slapd
from tests.support.certificates import Authority
from tests.support.waiting import wait_until

SUFFIX = "dc=example,dc=org"
ADMIN_DN, ADMIN_PASSWORD = f"cn=admin,{SUFFIX}", "admin password"
READER_DN, READER_PASSWORD = f"cn=reader,{SUFFIX}", "reader password"
"""An account without limits, which may read all."""
LIMITED_DN, LIMITED_PASSWORD = f"cn=limited,{SUFFIX}", "limited password"
"""An account with the size limit that slapd gives by default."""
LOG_SUFFIX = "cn=accesslog"
_PORT_ATTEMPTS = 5
_MODULES = (Path("/usr/lib/ldap"), Path("/usr/lib64/openldap"), Path("/usr/libexec/openldap"))
_SCHEMAS = (Path("/etc/ldap/schema"), Path("/etc/openldap/schema"))


@dataclass(frozen=True, kw_only=True)
class SlapdOptions:
    """What the generated slapd.conf says."""

    syncprov: bool = True
    session_log: int = 1000
    """How many deletions and changes slapd remembers for the next refresh; 0: none."""
    accesslog: bool = False
    """Log all writes in the database cn=accesslog."""
    session_log_source: bool = False
    """Keep the session log in the access log, so that it survives a restart."""
    tls: bool = False
    size_limit: int = 500
    """The limit of accounts without `limits`; 500 is the default of slapd."""
    server_id: int | None = None
    max_size_mb: int = 256
    lines: Sequence[str] = ()
    """More lines for the database."""
    global_lines: Sequence[str] = ()
    """More lines before the databases."""


@dataclass
class Slapd:
    """One slapd. A context manager; its directory keeps the database between `stop` and `start`."""

    directory: Path
    options: SlapdOptions = field(default_factory=SlapdOptions)
    port: int = 0
    tls_port: int = 0
    _child: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        return f"ldap://127.0.0.1:{self.port}"

    @property
    def tls_uri(self) -> str:
        return f"ldaps://127.0.0.1:{self.tls_port}"

    @property
    def tls_ca(self) -> Path:
        return self.directory / "ca.pem"

    @property
    def pid(self) -> int:
        assert self._child is not None, "slapd is not running"
        return self._child.pid

    def __enter__(self) -> Self:
        self.prepare()
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def prepare(self) -> None:
        """Create the directories, the configuration, and certificates where they are wanted."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for path in self._databases():
            path.mkdir(exist_ok=True)
        if self.options.tls and not self.tls_ca.exists():
            Authority(self.directory).issue("slapd", "IP:127.0.0.1")
        (self.directory / "slapd.conf").write_text("\n".join(self._configuration()) + "\n")

    def start(self) -> None:
        """Start slapd and wait until it accepts connections; keep the port of an earlier start."""
        program = find_slapd()
        assert program is not None
        for _ in range(_PORT_ATTEMPTS if not self.port else 1):
            port, tls_port = (
                (self.port, self.tls_port) if self.port else (free_port("127.0.0.1"), free_port("127.0.0.1"))
            )
            urls = f"ldap://127.0.0.1:{port}" + (f" ldaps://127.0.0.1:{tls_port}" if self.options.tls else "")
            command = [program, "-f", str(self.directory / "slapd.conf"), "-h", urls, "-d", "none"]
            with (self.directory / "slapd.log").open("ab") as log:
                self._child = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            if self._wait(port) == "answers":
                self.port, self.tls_port = port, tls_port
                return
            self._child.wait()
        raise AssertionError(f"slapd does not start: {self.log()[-2000:]}")

    def stop(self) -> None:
        """End slapd by its own means."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End slapd with SIGKILL, if it runs."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Stop and start: the session log in memory is lost."""
        self.stop()
        self.start()

    def wipe(self) -> None:
        """Remove all databases of a stopped slapd."""
        for path in self._databases():
            shutil.rmtree(path)
            path.mkdir()

    def snapshot(self, target: Path) -> None:
        """Copy the databases of a stopped slapd."""
        for path in self._databases():
            shutil.copytree(path, target / path.name)

    def restore(self, source: Path) -> None:
        """Put a copy in the place of the databases of a stopped slapd."""
        for path in self._databases():
            shutil.rmtree(path)
            shutil.copytree(source / path.name, path)

    def log(self) -> str:
        """Return what slapd has written."""
        path = self.directory / "slapd.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def add_base(self) -> None:
        """Add the entry of the suffix and the accounts for readers."""
        self.add(SUFFIX, objectClass=["organization", "dcObject"], o="Example", dc="example")
        for dn, password in ((READER_DN, READER_PASSWORD), (LIMITED_DN, LIMITED_PASSWORD)):
            name = dn.partition(",")[0].removeprefix("cn=")
            self.add(dn, objectClass=["organizationalRole", "simpleSecurityObject"], cn=name, userPassword=password)

    def add(self, dn: str, **attributes: object) -> None:
        """Add an entry. A value is text, bytes, or a list of them; `__` in a name stands for `;` (options)."""
        self.change(_lines("dn", dn), _lines("changetype", "add"), *_attribute_lines(attributes))

    def add_many(self, entries: Iterable[tuple[str, dict[str, object]]]) -> None:
        """Add entries with one program and one connection."""
        self.apply(
            "\n".join("".join([*_lines("dn", dn), *_attribute_lines(attributes)]) for dn, attributes in entries),
            "-a",
        )

    def replace(self, dn: str, **attributes: object) -> None:
        """Replace the values of attributes."""
        parts: list[Iterable[str]] = [_lines("dn", dn), _lines("changetype", "modify")]
        for name, values in attributes.items():
            parts += [_lines("replace", _name(name)), *_attribute_lines({name: values}), ["-\n"]]
        self.change(*parts)

    def delete(self, dn: str) -> None:
        """Delete an entry."""
        self.change(_lines("dn", dn), _lines("changetype", "delete"))

    def rename(self, dn: str, new_rdn: str, *, delete_old_rdn: bool = True, new_superior: str | None = None) -> None:
        """Rename an entry, or move it with all entries below."""
        parts = [_lines("dn", dn), _lines("changetype", "modrdn"), _lines("newrdn", new_rdn)]
        parts.append(_lines("deleteoldrdn", "1" if delete_old_rdn else "0"))
        self.change(*parts, *([] if new_superior is None else [_lines("newsuperior", new_superior)]))

    def change(self, *parts: Iterable[str]) -> None:
        """Apply one change record."""
        self.apply("".join(line for part in parts for line in part))

    def apply(self, ldif: str, *options: str) -> None:
        """Apply change records in LDIF with ldapmodify."""
        self.run("ldapmodify", *options, given=ldif)

    def run(self, program: str, *options: str, given: str = "", bind_dn: str = ADMIN_DN) -> str:
        """Run a program of ldap-utils as the administrator; return what it prints."""
        password = {ADMIN_DN: ADMIN_PASSWORD, READER_DN: READER_PASSWORD}[bind_dn]
        command = [program, "-x", "-H", self.uri, "-D", bind_dn, "-w", password, *options]
        done = subprocess.run(command, input=given.encode(), capture_output=True, check=False, timeout=300)
        assert done.returncode == 0, f"{program}: {done.stderr.decode(errors='replace')}"
        return done.stdout.decode(errors="replace")

    def _databases(self) -> list[Path]:
        return [self.directory / "data"] + ([self.directory / "log"] if self.options.accesslog else [])

    def _wait(self, port: int) -> str:
        return wait_until(lambda: self._answers(port) or self._has_ended(), what="slapd")

    def _answers(self, port: int) -> str | None:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                # Another program may have got the port: then this slapd ends.
                return None if self._has_ended() else "answers"
        except OSError:
            return None

    def _has_ended(self) -> str | None:
        assert self._child is not None
        return "ended" if self._child.poll() is not None else None

    def _end(self, number: signal.Signals) -> None:
        if self._child is not None:
            if self._child.poll() is None:
                os.kill(self._child.pid, number)
            self._child.wait(60)
            self._child = None

    def _configuration(self) -> list[str]:
        options, home = self.options, self.directory
        modules = next((str(path) for path in _MODULES if path.is_dir()), "")
        schemas = next(path for path in _SCHEMAS if path.is_dir())
        lines = [f"include {schemas / name}.schema" for name in ("core", "cosine", "inetorgperson", "nis")]
        lines += [f"modulepath {modules}"] if modules else []
        lines += [f"moduleload {name}" for name in ("back_mdb", "syncprov", "accesslog")]
        lines += [
            f"pidfile {home / 'slapd.pid'}",
            f"sizelimit {options.size_limit}",
            "sockbuf_max_incoming_auth 67108864",
        ]
        lines += [f"serverID {options.server_id}"] if options.server_id is not None else []
        if options.tls:
            lines += [f"TLSCACertificateFile {self.tls_ca}", f"TLSCertificateFile {home / 'slapd.pem'}"]
            lines += [f"TLSCertificateKeyFile {home / 'slapd.key'}"]
        lines += options.global_lines
        log = self._database(LOG_SUFFIX, "log") if options.accesslog else []
        if log:
            log += ["index reqStart,reqType,entryCSN,objectClass,entryUUID eq"]
            log += ["overlay syncprov", "syncprov-nopresent TRUE", "syncprov-reloadhint TRUE"]
        data = self._database(SUFFIX, "data")
        data += ["index objectClass,entryCSN,entryUUID,uid eq"]
        data += ["access to attrs=userPassword by dn.exact=" + f'"{READER_DN}"' + " read by anonymous auth by * none"]
        data += ["access to * by users read by anonymous auth", *options.lines]
        if options.syncprov:
            data += ["overlay syncprov"]
            if options.session_log_source:
                data += [f"syncprov-sessionlog-source {LOG_SUFFIX}"]
            elif options.session_log:
                data += [f"syncprov-sessionlog {options.session_log}"]
        if options.accesslog:
            data += ["overlay accesslog", f"logdb {LOG_SUFFIX}", "logops writes", "logold (objectClass=*)"]
            data += ["logoldattr description", "logsuccess TRUE"]
        return [*lines, *log, *data]

    def _database(self, suffix: str, name: str) -> list[str]:
        return [
            "database mdb",
            f"suffix {suffix}",
            f"rootdn {ADMIN_DN}",
            *([f'rootpw "{ADMIN_PASSWORD}"'] if suffix == SUFFIX else []),
            f"directory {self.directory / name}",
            f"maxsize {self.options.max_size_mb << 20}",
            "dbnosync",
            f'limits dn.exact="{READER_DN}" size=unlimited time=unlimited',
        ]


def require_slapd() -> None:
    """Skip the tests of a module where slapd is not installed and cannot be."""
    if find_slapd() is None or shutil.which("ldapmodify") is None:
        pytest.skip("no slapd on this machine: python -m scripts.slapd installs it where that is allowed")


def _attribute_lines(attributes: dict[str, object]) -> list[str]:
    found = []
    for name, values in attributes.items():
        for value in values if isinstance(values, list | tuple) else [values]:
            found += _lines(_name(name), value)
    return found


def _name(name: str) -> str:
    return name.replace("__", ";")


def _lines(name: str, value: object) -> list[str]:
    raw = value if isinstance(value, bytes) else str(value).encode()
    return [f"{name}:: {base64.b64encode(raw).decode()}\n"]
