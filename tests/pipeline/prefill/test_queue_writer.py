import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purveyor.model.errors import InvalidInput
from purveyor.pipeline.prefill.queue_writer import with_publisher, without_old


def test_every_byte_but_old_stays() -> None:
    before = (
        '{ "x": [1, {"old": {"a": 1}}], "body" :{"new":{"n":12345678901234567890.12345678901234567890,'
        '"s":"\\u0041 \\"old\\": {} }","old":{"a":1}} , "old" : {"q": {"r": "}"}, "e": 1E400} } ,"key":"é" }'
    )
    after = before.replace('{"q": {"r": "}"}, "e": 1E400}', "{}")

    assert without_old(before.encode()) == after.encode()


def test_an_event_without_old_stays_as_it_is() -> None:
    assert without_old(b'{"body":{"new":{"a":1}}}') == b'{"body":{"new":{"a":1}}}'
    assert without_old(b'{"body":{}}') == b'{"body":{}}'


def test_every_byte_but_the_publisher_stays() -> None:
    before = (
        '{ "x": {"publisher_name": 1}, "publisher_name" :"live" , "body":{"new":{"n":1.10,"s":"\\u0041"}},"key":"é" }'
    )
    after = before.replace('"live"', '"prefill"')
    assert with_publisher(before.encode(), "prefill") == after.encode()
    assert with_publisher(b'{"body":{}}', "prefill") == b'{"body":{}}'


@pytest.mark.parametrize("broken", [b"", b"[]", b'{"body"', b'{"body":{"old":', b"\xff"])
def test_a_message_that_is_not_an_event_is_an_error(broken: bytes) -> None:
    with pytest.raises(InvalidInput):
        without_old(broken)
    with pytest.raises(InvalidInput):
        with_publisher(broken, "prefill")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
OBJECT = st.dictionaries(st.text(), JSON, max_size=4)


@given(OBJECT, OBJECT, OBJECT, st.sampled_from([None, 1]), st.booleans())
def test_only_old_changes(
    rest: dict[str, object], old: dict[str, object], new: dict[str, object], indent: int | None, first: bool
) -> None:
    body = {"old": old, "new": new} if first else {"new": new, "old": old}
    event = {**rest, "body": body}

    cut = json.loads(without_old(json.dumps(event, indent=indent).encode()))

    assert cut == {**event, "body": {"old": {}, "new": new}}
