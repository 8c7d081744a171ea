"""Hidden fields are removed, and nothing else: compared with a reference implementation on parsed JSON."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purveyor.model.delivery_policy import Delivery, OrderBy
from purveyor.model.errors import InvalidInput
from purveyor.model.redaction import candidate_pattern, check_hidden_field, find_hiding_field, redact
from purveyor.model.subscription import Filter, RealmTopic, Subscription

HIDDEN = ("password", "größe", "k/e", "a.password", "a.a", "new.a", "old.password", "new.a.größe")
names = st.sampled_from(("password", "passWord", "a", "größe", "k/e", 'say "password', "", "new"))
values = st.recursive(
    st.sampled_from((None, True, 1, -0.5, "x", 'a "password": 1', "\\", "{")) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)
objects = st.dictionaries(names, values, max_size=4)


@given(
    old=objects,
    new=objects,
    other=objects,
    hidden=st.lists(st.sampled_from(HIDDEN), unique=True),
    way=st.integers(0, 5),
)
def test_the_hidden_fields_are_gone_and_all_else_is_as_it_was(
    old: Any, new: Any, other: Any, hidden: list[str], way: int
) -> None:
    data = spelled({"attributes": other, "body": {"old": old, "other": other, "new": new}, "password": 1}, way)

    found = redact(data, hidden)

    assert json.loads(found) == expected(json.loads(data), hidden)
    if json.loads(found) == json.loads(data):
        assert found == data
    elif hidden:
        assert re.search(candidate_pattern(tuple(hidden)), data.decode())
        assert re.search(candidate_pattern(tuple(hidden)).encode(), data)


def spelled(data: Any, way: int) -> bytes:
    """The same JSON, written in one way or another."""
    text = json.dumps(data, ensure_ascii=way % 2 == 0, indent=way if way > 3 else None)
    if way in (1, 5):
        text = text.replace("asswor", "\\u0061ss\\u0057or").replace("k/e", "k\\/e")
    return text.encode("utf-8", "replace")


def expected(event: Any, hidden: list[str]) -> Any:
    """The rule, over what was parsed."""
    anywhere = {path for path in hidden if "." not in path}
    body = dict(event["body"])
    for side in ("old", "new"):
        other_side = {"old": "new.", "new": "old."}[side]
        paths = [path.removeprefix(f"{side}.").split(".") for path in hidden if not path.startswith(other_side)]
        body[side] = pruned(body[side], [path for path in paths if ".".join(path) not in anywhere], anywhere)
        tops = {path.removeprefix(f"{side}.") for path in hidden if path.startswith(f"{side}.")}
        body[side] = {name: value for name, value in body[side].items() if name.lower() not in tops}
    return {**event, "body": body}


def pruned(value: Any, paths: list[list[str]], anywhere: set[str]) -> Any:
    if isinstance(value, list):
        return [pruned(each, paths, anywhere) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: pruned(inner, [path[1:] for path in paths if len(path) > 1 and path[0] == name.lower()], anywhere)
        for name, inner in value.items()
        if name.lower() not in anywhere and [name.lower()] not in paths
    }


def test_every_other_byte_stays() -> None:
    data = b'{ "n":1.10,\n"body": {"old":{ "userPassword" : ["x"] } , "new": {"n": 1E2, "PASSWORD":"\\"}", "z":-0 }}} '
    cut = b'{ "n":1.10,\n"body": {"old":{  } , "new": {"n": 1E2, "z":-0 }}} '
    assert redact(data, ["userpassword", "password"]) == cut
    assert redact(data, ["salary", "n.password"]) is data
    assert redact(data, []) is data


def test_neither_depth_nor_length_is_too_much() -> None:
    deep = b'{"body": {"new": {"a": ' + b"[" * 2_000 + b'{"password": 1}' + b"]" * 2_000 + b"}}}"
    assert redact(deep, ["password"]) == deep.replace(b'"password": 1', b"")
    assert redact(deep, ["a.password"]) == deep.replace(b'"password": 1', b"")
    number = b'{"body": {"new": {"a": ' + b"7" * 10_000 + b', "password": 1}}}'
    assert redact(number, ["password"]) == number.replace(b', "password": 1', b"")


@pytest.mark.parametrize(
    "data", [b"", b"{", b'{"body": {"new": {"password"', b'{"body": {"new": {"password": "', b"\xff"]
)
def test_what_is_no_json_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidInput):
        redact(data, ["password"])


@pytest.mark.parametrize("path", ["", ".", "a.", "new", "a b", 'a"', "a\\b", ",", "a:b", "x\n", "{"])
def test_what_can_be_no_name_is_refused(path: str) -> None:
    with pytest.raises(InvalidInput):
        check_hidden_field(path)


def test_a_filter_cannot_be_used_to_read_what_is_hidden() -> None:
    def subscription(path: str, hidden: tuple[str, ...]) -> Subscription:
        wanted = Filter(fields={path: ("x",)})
        topics = (RealmTopic("udm", "users/user"),)
        return Subscription(name="ox", realms_topics=topics, filter=wanted, hidden_fields=hidden)

    for path, hidden in (
        ("password", ("password",)),
        ("new.properties.PassWord.hash", ("password",)),
        ("address.street", ("address.street",)),
        ("address.street", ("old.address",)),
        ("old.address.street", ("old.address",)),
    ):
        assert find_hiding_field(hidden, path) == hidden[0]
        with pytest.raises(InvalidInput, match="hidden"):
            subscription(path, hidden)
    assert subscription("address", ("address.street",)).filter
    assert subscription("new.address", ("old.address",)).filter
    assert subscription("password", ()).filter


def test_an_order_by_key_needs_the_key() -> None:
    topics = (RealmTopic("udm", "users/user"),)
    with pytest.raises(InvalidInput, match="order by key"):
        Subscription(
            name="ox",
            realms_topics=topics,
            delivery=Delivery.PARALLEL,
            order_by=OrderBy.KEY,
            hidden_fields=("dn",),
        )
