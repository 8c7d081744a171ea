"""Every option: its setting, its errors, and that no secret is shown."""

import pickle
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purveyor.jetstream.address import Tls
from purveyor.model.errors import InvalidInput, SetupError
from purveyor.spark.options import (
    COLUMNS,
    NamedOffset,
    ReadSettings,
    WriteDelivery,
    WriteSettings,
    read_settings,
    write_settings,
)

BASE = {"servers": "nats://127.0.0.1:4222", "stream": "S"}


def reading(**options: str) -> ReadSettings:
    return read_settings({**BASE, **options})


def writing(**options: str) -> WriteSettings:
    return write_settings({"servers": BASE["servers"], **options})


def test_the_defaults_to_read() -> None:
    settings = reading()
    assert settings.address.urls == ("nats://127.0.0.1:4222",)
    assert settings == ReadSettings(address=settings.address, stream="S")
    assert (settings.starting, settings.ending) == (NamedOffset.EARLIEST, NamedOffset.LATEST)
    assert settings.columns == COLUMNS
    assert settings.fail_on_data_loss
    assert settings.max_offsets is None


def test_the_defaults_to_write() -> None:
    settings = writing()
    assert settings == WriteSettings(address=settings.address)
    assert settings.delivery is WriteDelivery.AUTO


@pytest.mark.parametrize(
    ("option", "value", "field", "expected"),
    [
        ("subjects", "a.*, b.> ,c", "subjects", ("a.*", "b.>", "c")),
        ("startingOffsets", "latest", "starting", NamedOffset.LATEST),
        ("startingOffsets", "EARLIEST", "starting", NamedOffset.EARLIEST),
        ("startingOffsets", "17", "starting", 17),
        ("startingOffsets", "2026-01-31T12:00:00Z", "starting", datetime(2026, 1, 31, 12, tzinfo=UTC)),
        ("startingOffsets", "2026-01-31", "starting", datetime(2026, 1, 31, tzinfo=UTC)),
        (
            "startingOffsets",
            "2026-01-31T12:00:00+02:00",
            "starting",
            datetime(2026, 1, 31, 12, tzinfo=timezone(timedelta(hours=2))),
        ),
        ("endingOffsets", "earliest", "ending", NamedOffset.EARLIEST),
        ("endingOffsets", "9", "ending", 9),
        ("maxOffsetsPerTrigger", "500", "max_offsets", 500),
        ("batchSeconds", "5", "batch_seconds", 5),
        ("minPartitions", "8", "min_partitions", 8),
        ("failOnDataLoss", "False", "fail_on_data_loss", False),
        ("failOnDataLoss", "true", "fail_on_data_loss", True),
        ("durable", "spark", "durable", "spark"),
        ("columns", "data,sequence", "columns", ("sequence", "data")),
        ("idleWaitMillis", "0", "idle_wait_seconds", 0.0),
        ("idleWaitMillis", "250", "idle_wait_seconds", 0.25),
        ("patienceSeconds", "5", "patience_seconds", 5),
    ],
)
def test_an_option_to_read(option: str, value: str, field: str, expected: object) -> None:
    assert getattr(reading(**{option: value}), field) == expected
    assert getattr(reading(**{option.lower(): f" {value} "}), field) == expected, "Spark gives names in lower case"


@pytest.mark.parametrize(
    ("option", "value", "field", "expected"),
    [
        ("stream", "T", "stream", "T"),
        ("subject", "a.b", "subject", "a.b"),
        ("orderBy", "sequence", "order_by", "sequence"),
        ("delivery", "PIPELINED", "delivery", WriteDelivery.PIPELINED),
        ("patienceSeconds", "5", "patience_seconds", 5),
    ],
)
def test_an_option_to_write(option: str, value: str, field: str, expected: object) -> None:
    assert getattr(writing(**{option: value}), field) == expected
    assert getattr(writing(**{option.upper(): value}), field) == expected


def test_logins() -> None:
    assert reading(servers="nats://ada:pw@h1,nats://h2:4333").address.urls == ("nats://h1:4222", "nats://h2:4333")
    by_url = reading(servers="nats://ada:pw@h1").address
    by_options = reading(servers="nats://h1", user="ada", password="pw").address
    assert by_url == by_options
    assert (by_url.user, by_url.password) == ("ada", "pw")
    assert reading(token="t").address.token == "t"


def test_tls_and_credentials(tmp_path: Path) -> None:
    creds = tmp_path / "user.creds"
    creds.write_text("x")
    settings = reading(
        credentials=str(creds), tlsCa="ca.pem", tlsCertificate="c.pem", tlsKey="k.pem", tlsHostname="h", tlsFirst="true"
    )
    assert settings.address.credentials == creds
    assert settings.address.tls == Tls(Path("ca.pem"), Path("c.pem"), Path("k.pem"), "h", first=True)
    assert reading(servers="tls://h").address.tls == Tls()
    with pytest.raises(SetupError, match="does not exist"):
        reading(credentials=str(tmp_path / "none"))


WRONG = [
    ({"stream": ""}, "option stream is missing", '.option("stream", ...)'),
    ({"servers": " ", "user": "a"}, "option user is given without option servers", '.option("servers", ...)'),
    ({"servers": "http://x"}, "http://x", "nats://host:4222"),
    ({"stream": "a b"}, "a b", None),
    ({"stream": "a.b"}, "a.b", None),
    ({"subjects": "a..b"}, "a..b", None),
    ({"startingOffsets": "soon"}, "startingOffsets: 'soon'", "ISO time"),
    ({"startingOffsets": "-1"}, "startingOffsets: '-1'", "a sequence"),
    ({"endingOffsets": "2026-13-01"}, "endingOffsets: '2026-13-01'", "ISO time"),
    ({"batchSeconds": "0"}, "batchSeconds: '0'", "1"),
    ({"maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger: '0'", "1"),
    ({"maxOffsetsPerTrigger": "many"}, "maxOffsetsPerTrigger: 'many'", "1"),
    ({"maxOffsetsPerTrigger": "²"}, "maxOffsetsPerTrigger: '²'", "1"),
    ({"startingOffsets": "²"}, "startingOffsets: '²'", "ISO time"),
    ({"minPartitions": "1.5"}, "minPartitions: '1.5'", "1"),
    ({"failOnDataLoss": "no"}, "failOnDataLoss: 'no'", "true or false"),
    ({"durable": "a.b"}, "a.b", None),
    ({"columns": "sequence,key"}, "no column 'key'", "sequence, timestamp, subject, headers, data"),
    ({"idleWaitMillis": "-5"}, "idleWaitMillis: '-5'", "0"),
    ({"patienceSeconds": "0"}, "patienceSeconds: '0'", "1"),
    ({"user": "ada"}, "user needs option password", "both"),
    ({"password": "pw"}, "password needs option user", "both"),
    ({"token": "t", "user": "ada", "password": "pw"}, "more than one login", "token"),
    ({"startingOfsets": "1"}, "no option 'startingOfsets'", "did you mean startingOffsets?"),
    ({"topic": "1"}, "no option 'topic'", "known: servers"),
    ({"orderBy": "x"}, "no option 'orderBy'", None),
]


@pytest.mark.parametrize(("options", "reported", "fix"), WRONG, ids=[next(iter(each[0])) for each in WRONG])
def test_a_wrong_option_is_named_with_what_to_do(options: dict[str, str], reported: str, fix: str | None) -> None:
    with pytest.raises(InvalidInput) as caught:
        reading(**options)
    assert reported in caught.value.message
    assert caught.value.fix
    if fix is not None:
        assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("options", "reported", "fix"),
    [
        ({"delivery": "atomic"}, "atomic batches go to one stream", "option stream"),
        ({"delivery": "fast"}, "delivery: 'fast'", "auto, atomic, pipelined"),
        ({"subject": "a.*"}, "a.*", None),
        ({"stream": "a b"}, "a b", None),
        ({"startingOffsets": "1"}, "no option 'startingOffsets'", None),
        ({"orderby": "x", "orderBye": "y"}, "no option 'orderBye'", "orderBy"),
    ],
)
def test_a_wrong_option_to_write(options: dict[str, str], reported: str, fix: str | None) -> None:
    with pytest.raises(InvalidInput) as caught:
        writing(**options)
    assert reported in caught.value.message
    if fix is not None:
        assert caught.value.fix is not None
        assert fix in caught.value.fix


SECRET = "s3cr3t-Pa55"


@pytest.mark.parametrize(
    "options",
    [
        {"servers": f"nats://ada:{SECRET}@h"},
        {"user": "ada", "password": SECRET},
        {"token": SECRET},
        {"servers": f"nats://{SECRET}@h"},
    ],
)
def test_no_secret_is_shown(options: dict[str, str]) -> None:
    settings = reading(**options)
    assert SECRET in (settings.address.password, settings.address.token)
    assert SECRET not in repr(settings) + str(settings.address)
    for wrong in ({"stream": "a b"}, {"columns": "x"}, {"nonsense": "1"}, {"minPartitions": "x"}):
        with pytest.raises(InvalidInput) as caught:
            read_settings({**BASE, **options, **wrong})
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize("servers", [f"http://ada:{SECRET}@h", f"nats://ada:{SECRET}@:1", f"nats://ada:{SECRET}@h:x"])
def test_no_secret_is_shown_in_a_wrong_address(servers: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        reading(servers=servers)
    assert SECRET not in str(caught.value)


def test_an_unknown_option_shows_no_value() -> None:
    with pytest.raises(InvalidInput) as caught:
        reading(passwort=SECRET)
    assert SECRET not in str(caught.value)
    assert caught.value.fix == "did you mean password?"


@given(st.text(max_size=30), st.text(max_size=30))
def test_any_option_gives_settings_or_a_purveyor_error(name: str, value: str) -> None:
    for option in (name, "startingOffsets", "subjects", "servers", "columns", "maxOffsetsPerTrigger", "stream"):
        try:
            settings = read_settings({**BASE, option: value})
        except (InvalidInput, SetupError):
            continue
        assert pickle.loads(pickle.dumps(settings)) == settings
