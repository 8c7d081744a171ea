"""The options of the `jetstream` format: parses the user's strings into typed settings.

Pure, except that without `servers` it looks for the server that the environment names.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path

from purveyor.jetstream.address import DEFAULT_INBOX, Address, Tls
from purveyor.jetstream.server import find_server_address
from purveyor.model.errors import InvalidConfig
from purveyor.model.name_rules import check_name, check_subject

COLUMNS = ("sequence", "timestamp", "subject", "headers", "data")

_CONNECTION = ("servers", "user", "password", "token", "credentials", "inboxPrefix", "patienceSeconds")
_TLS = ("tlsCa", "tlsCertificate", "tlsKey", "tlsHostname", "tlsFirst")
_READ = ("stream", "subjects", "startingOffsets", "endingOffsets", "maxOffsetsPerTrigger", "minPartitions",
         "failOnDataLoss", "durable", "columns", "idleWaitMillis", "batchSeconds", "holdSeconds",
         "syncCheckpoint")  # fmt: skip
_WRITE = ("stream", "subject", "orderBy", "delivery")
_SPARK_OWN = ("path", "checkpointLocation", "queryName")


class NamedOffset(Enum):
    """Offsets that have a name."""

    EARLIEST = "earliest"
    LATEST = "latest"


OffsetSpec = NamedOffset | int | datetime
"""Where a read begins or ends: by name, by sequence, or by time."""


class WriteDelivery(Enum):
    """How a write stores rows."""

    AUTO = "auto"
    """In atomic batches if the target stream is named and allows it, else pipelined."""
    ATOMIC = "atomic"
    PIPELINED = "pipelined"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSettings:
    """The settings of a reader."""

    address: Address
    stream: str
    subjects: tuple[str, ...] = ()
    starting: OffsetSpec = NamedOffset.EARLIEST
    ending: OffsetSpec = NamedOffset.LATEST
    max_offsets: int | None = None
    min_partitions: int = 1
    fail_on_data_loss: bool = True
    durable: str | None = None
    columns: tuple[str, ...] = COLUMNS
    raw_headers: bool = False
    """Headers as in `ReadOptions.raw_headers`. Not an option of the format; sources that build on it set it."""
    idle_wait_seconds: float = 0.5
    batch_seconds: int | None = None
    patience_seconds: float = 60.0
    hold_seconds: float = 0.0
    """How long the stream keeps the messages of a batch that is done."""
    sync_checkpoint: Path | None = None
    """The checkpoint of the query, which is flushed to the disk before the durable moves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSettings:
    """The settings of a writer."""

    address: Address
    stream: str | None = None
    subject: str | None = None
    order_by: str | None = None
    delivery: WriteDelivery = WriteDelivery.AUTO
    patience_seconds: float = 60.0


def read_settings(options: Mapping[str, str]) -> ReadSettings:
    """Parse the options of a reader; InvalidConfig names the wrong option and its valid values."""
    given = _OptionReader(options, (*_CONNECTION, *_TLS, *_READ))
    columns = given.words("columns") or COLUMNS
    unknown = [name for name in columns if name not in COLUMNS]
    if unknown:
        raise InvalidConfig(f"option columns: no column {unknown[0]!r}", fix=f"choose from {', '.join(COLUMNS)}")
    durable = given.text("durable")
    return ReadSettings(
        address=given.address(),
        stream=check_name(given.required("stream"), "stream"),
        subjects=tuple(check_subject(subject, wildcards=True) for subject in given.words("subjects")),
        starting=given.offset_spec("startingOffsets", NamedOffset.EARLIEST),
        ending=given.offset_spec("endingOffsets", NamedOffset.LATEST),
        max_offsets=given.number("maxOffsetsPerTrigger", at_least=1),
        min_partitions=given.number("minPartitions", at_least=1) or 1,
        fail_on_data_loss=given.flag("failOnDataLoss", default=True),
        durable=check_name(durable, "consumer") if durable else None,
        columns=tuple(name for name in COLUMNS if name in columns),
        idle_wait_seconds=_millis(given.number("idleWaitMillis", at_least=0), 0.5),
        batch_seconds=given.number("batchSeconds", at_least=1),
        patience_seconds=given.number("patienceSeconds", at_least=1) or 60,
        hold_seconds=given.number("holdSeconds", at_least=0) or 0,
        sync_checkpoint=given.directory("syncCheckpoint"),
    )


def write_settings(options: Mapping[str, str]) -> WriteSettings:
    """Parse the options of a writer."""
    given = _OptionReader(options, (*_CONNECTION, *_TLS, *_WRITE))
    stream, subject = given.text("stream"), given.text("subject")
    delivery = given.choice("delivery", WriteDelivery, WriteDelivery.AUTO)
    if delivery is WriteDelivery.ATOMIC and stream is None:
        raise InvalidConfig("option delivery: atomic batches go to one stream", fix="name it with option stream")
    return WriteSettings(
        address=given.address(),
        stream=check_name(stream, "stream") if stream else None,
        subject=check_subject(subject) if subject else None,
        order_by=given.text("orderBy"),
        delivery=delivery,
        patience_seconds=given.number("patienceSeconds", at_least=1) or 60,
    )


def connection_options(address: Address) -> dict[str, str]:
    """Return an address as options of the format."""
    tls = address.tls or Tls()
    given = {
        "servers": str(address),
        "user": address.user,
        "password": address.password,
        "token": address.token,
        "credentials": address.credentials,
        "inboxPrefix": address.inbox if address.inbox != DEFAULT_INBOX else None,
        "tlsCa": tls.ca,
        "tlsCertificate": tls.certificate,
        "tlsKey": tls.key,
        "tlsHostname": tls.hostname,
        "tlsFirst": "true" if tls.first else None,
    }
    return {name: str(value) for name, value in given.items() if value is not None}


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _millis(value: int | None, default_seconds: float) -> float:
    return default_seconds if value is None else value / 1000


class _OptionReader:
    """The options that the user set, by name in any case."""

    def __init__(self, options: Mapping[str, str], known: tuple[str, ...]) -> None:
        by_lower = {name.lower(): name for name in (*known, *_SPARK_OWN)}
        self._values: dict[str, str] = {}
        for written, value in options.items():
            name = by_lower.get(written.lower())
            if name is None:
                near = difflib.get_close_matches(written.lower(), by_lower, 1)
                hint = f"did you mean {by_lower[near[0]]}?" if near else f"known: {', '.join(known)}"
                raise InvalidConfig(f"the jetstream format has no option {written!r}", fix=hint)
            self._values[name] = str(value)

    def text(self, name: str) -> str | None:
        value = self._values.get(name, "").strip()
        return value or None

    def required(self, name: str) -> str:
        value = self.text(name)
        if value is None:
            raise InvalidConfig(f"option {name} is missing", fix=f'add .option("{name}", ...)')
        return value

    def words(self, name: str) -> tuple[str, ...]:
        return tuple(word.strip() for word in (self.text(name) or "").split(",") if word.strip())

    def number(self, name: str, *, at_least: int) -> int | None:
        value = self.text(name)
        if value is None:
            return None
        if not _is_number(value) or int(value) < at_least:
            raise InvalidConfig(f"option {name}: {value!r}", fix=f"a whole number, {at_least} or more")
        return int(value)

    def flag(self, name: str, *, default: bool) -> bool:
        value = (self.text(name) or str(default)).lower()
        if value not in ("true", "false"):
            raise InvalidConfig(f"option {name}: {value!r}", fix="true or false")
        return value == "true"

    def directory(self, name: str) -> Path | None:
        value = self.text(name)
        if value is None:
            return None
        path = Path(value.removeprefix("file://"))
        if not path.is_absolute():
            raise InvalidConfig(f"option {name}: {value!r}", fix="the absolute path of the checkpoint on this machine")
        return path

    def choice(self, name: str, kind: type[WriteDelivery], default: WriteDelivery) -> WriteDelivery:
        value = self.text(name)
        try:
            return kind(value.lower()) if value else default
        except ValueError:
            choices = ", ".join(each.value for each in kind)
            raise InvalidConfig(f"option {name}: {value!r}", fix=f"one of {choices}") from None

    def offset_spec(self, name: str, default: NamedOffset) -> OffsetSpec:
        value = self.text(name)
        if value is None:
            return default
        if value.lower() in (NamedOffset.EARLIEST.value, NamedOffset.LATEST.value):
            return NamedOffset(value.lower())
        if _is_number(value):
            return int(value)
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            raise InvalidConfig(
                f"option {name}: {value!r} is no offset in a stream",
                fix="earliest, latest, a sequence, or an ISO time such as 2026-01-31T12:00:00Z",
            ) from None
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)

    def address(self) -> Address:
        servers = self.text("servers")
        if servers is None:
            if alone := [name for name in (*_CONNECTION, *_TLS) if name != "patienceSeconds" and self.text(name)]:
                raise InvalidConfig(
                    f"option {alone[0]} is given without option servers", fix='add .option("servers", ...)'
                )
            return find_server_address()
        address = Address.parse(
            servers,
            credentials=self.text("credentials"),
            tls=self._tls(),
            inbox=self.text("inboxPrefix") or DEFAULT_INBOX,
        )
        user, password, token = self.text("user"), self.text("password"), self.text("token")
        if (user is None) != (password is None):
            there, missing = ("user", "password") if password is None else ("password", "user")
            raise InvalidConfig(f"option {there} needs option {missing}", fix="give both, or credentials")
        if sum(login is not None for login in (user, token, address.credentials)) > 1:
            raise InvalidConfig(
                "the options name more than one login", fix="give user and password, or token, or credentials"
            )
        if user is not None and password is not None:
            return address.with_password(user, password)
        if token is not None:
            return replace(address, user=None, password=None, token=token)
        return address

    def _tls(self) -> Tls | None:
        if not any(self.text(name) for name in _TLS):
            return None
        paths = {name: Path(value) if (value := self.text(name)) else None for name in _TLS[:3]}
        return Tls(
            ca=paths["tlsCa"],
            certificate=paths["tlsCertificate"],
            key=paths["tlsKey"],
            hostname=self.text("tlsHostname"),
            first=self.flag("tlsFirst", default=False),
        )
