"""The types of an endpoint as JSON: values are the same after a round trip, and an error names the wrong field."""

import enum
import uuid
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Literal

import msgspec
import pytest
from pydantic import BaseModel, PydanticUserError, TypeAdapter, ValidationError

from purveyor.model.errors import InvalidInput
from purveyor.stages.message_codec import dump, load


class Colour(enum.Enum):
    RED = "red"


class Model(BaseModel):
    name: str
    at: datetime


@dataclass(frozen=True)
class Everything:
    number: int
    ratio: float
    colour: Colour
    when: datetime
    day: date
    length: timedelta
    id: uuid.UUID
    price: Decimal
    raw: bytes
    model: Model
    pair: tuple[int, str]
    many: tuple[int, ...] = ()
    names: list[str] = field(default_factory=list)
    by_name: dict[str, "Everything | None"] = field(default_factory=dict)
    maybe: int | None = None
    word: Literal["a", "b"] = "a"
    flags: set[int] = field(default_factory=set)
    anything: Any = None


def everything(**more: Any) -> Everything:
    moment = datetime(2026, 11, 16, 3, 0, tzinfo=UTC)
    plain: dict[str, Any] = {"number": 1, "ratio": 0.5, "colour": Colour.RED, "when": moment, "day": moment.date()}
    others: dict[str, Any] = {
        "length": timedelta(seconds=1.5),
        "id": uuid.UUID(int=7),
        "price": Decimal("1.10"),
        "raw": b"\xff",
    } | more
    return Everything(**plain, **others, model=Model(name="m", at=moment), pair=(1, "x"))


def test_every_type_survives_a_round_trip() -> None:
    inner = everything()
    value = everything(many=(1, 2), names=["a\n"], by_name={"x": inner, "y": None}, maybe=3, word="b", flags={1, 2})
    assert load(Everything, dump(value)) == value


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (int, b"true", "not of type int"),
        (Colour, b'"green"', "one of"),
        (list[int], b'["a"]', r"message\[0\]"),
        (dict[str, int], b'{"a": "b"}', r"message\.a"),
        (Model, b'{"name": 1}', "a Model"),
        (tuple[int, str], b"[1]", "a list of 2"),
    ],
)
def test_an_error_names_the_path_of_the_wrong_value(kind: Any, text: bytes, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        load(kind, text)


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Number:
    number: int


@dataclass(frozen=True)
class Binary:
    raw: bytes
    length: timedelta


def test_a_union_of_dataclasses_and_unknown_fields_are_decoded() -> None:
    assert load(Text | Number, b'{"number": 1}') == Number(1)  # type: ignore[arg-type, comparison-overlap]
    assert load(Text | Number, b'{"text": "a", "newer": true}') == Text("a")  # type: ignore[arg-type]
    assert load(Binary, b'{"raw": "/w==", "length": 1.5}') == Binary(b"\xff", timedelta(seconds=1.5))


def test_msgspec_would_lose_unions_and_the_stored_form_of_durations() -> None:
    with pytest.raises(TypeError, match="more than one dataclass"):
        msgspec.json.decode(b'{"number": 1}', type=Text | Number)
    with pytest.raises(TypeError, match="more than one str-like type"):
        msgspec.json.decode(b'"a"', type=str | datetime)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b"1.5", type=timedelta)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"name": "a", "at": "2026-11-16T03:00:00Z"}', type=Model)


def test_pydantic_would_lose_bytes_and_strict_durations() -> None:
    stored = b'{"raw": "/w==", "length": 1.5}'
    assert TypeAdapter(Binary).validate_json(stored).raw == b"/w=="  # not decoded
    with pytest.raises(PydanticUserError):
        TypeAdapter(Binary, config={"val_json_bytes": "base64"})
    with pytest.raises(ValidationError):
        TypeAdapter(Binary).validate_json(stored, strict=True)
    assert TypeAdapter(Number).validate_json(b'{"number": "1"}') == Number(1)  # without `strict` a text is a number
