"""The API refuses input that a later part could not process, names the field, and stores nothing."""

import json
from typing import Any

import httpx
import pytest

from purveyor.jetstream.address import Address
from tests.support.running_api import RunningApi, count, event, problem, read_incoming

HALF = "\ud800"
JSON = {"Content-Type": "application/json"}


def of_body(new: dict[str, Any], old: dict[str, Any] | None = None) -> dict[str, Any]:
    return event(body={"old": old or {}, "new": new})


def nested(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {"end": 1}
    for _ in range(levels - 1):
        found = {"in": found}
    return found


REFUSED = {
    "half a character as id": (event(id=f"a{HALF}"), "id"),
    "half a character in the realm": (event(realm=f"a{HALF}"), "realm"),
    "half a character in the topic": (event(topic=f"a{HALF}"), "topic"),
    "half a character in the key": (event(key=f"a{HALF}"), "key"),
    "half a character in the publisher": (event(publisher_name=f"a{HALF}"), "publisher_name"),
    "half a character in an attribute name": (event(attributes={f"a{HALF}": "x"}), "attribute"),
    "half a character in an attribute": (event(attributes={"a": HALF}), "attributes.a"),
    "half a character in a value": (of_body({"list": [1, {"name": HALF}]}), "body.new.list[1].name"),
    "half a character in a name": (of_body({}, {"in": {HALF: 1}}), "body.old.in"),
    "a long id": (event(id="ä" * 129), "id is 258 bytes"),
    "a blank at the end of the id": (event(id="a "), "id"),
    "a long realm": (event(realm="r" * 257), "realm is 257 bytes"),
    "a long topic": (event(topic="t" * 1025), "topic is 1025 bytes"),
    "a long key": (event(key="k" * 1025), "key is 1025 bytes"),
    "a long key in the object": (of_body({"dn": "k" * 1025}), "key"),
    "a line break in the key of the object": (of_body({"uuid": "a\nb"}), "key"),
    "a long publisher": (event(publisher_name="p" * 257), "publisher_name is 257 bytes"),
    "a long attribute name": (event(attributes={"a" * 257: "x"}), "attribute name is 257 bytes"),
    "an empty attribute name": (event(attributes={"": "x"}), "attribute"),
    "a long attribute": (event(attributes={"a": "x" * 1025}), "attributes.a is 1025 bytes"),
    "many attributes": (event(attributes={f"a{number}": "x" for number in range(101)}), "101 attributes"),
    "a control character in the key": (event(key="a\x1bb"), "key"),
    "a control character in the publisher": (event(publisher_name="a\x00b"), "publisher_name"),
    "a control character in an attribute": (event(attributes={"a": "x\ny"}), "attributes.a"),
    "a control character of C1": (event(topic="a\x9fb"), "topic"),
    "a huge whole number": (of_body({"deep": [10**400]}), "body.new.deep[0]"),
    "a whole number that Python does not read": (of_body({"n": 10**4299}), "body.new.n"),
    "deep nesting": (of_body(nested(101)), "nested"),
    "a long name in the object": (of_body({"n" * 4097: 1}), "name"),
    "a time before all times": (event(ts="0001-01-01T00:00:00+14:00"), "ts"),
    "a time after all times": (event(ts="2261-12-31T23:59:59-01:00"), "ts"),
}


@pytest.mark.parametrize(("sent", "place"), REFUSED.values(), ids=REFUSED)
def test_what_a_part_could_not_process_is_422_with_its_place(
    events: httpx.Client, address: Address, sent: dict[str, Any], place: str
) -> None:
    before = count(address)
    reported = problem(events.post("/v1/messages", content=json.dumps(sent), headers=JSON), 422)
    assert place in reported["detail"]
    assert count(address) == before
    reported = problem(events.post("/v1/messages", content=json.dumps([event(), sent]), headers=JSON), 422)
    assert reported["detail"].startswith("event 2: ")
    assert place in reported["detail"]
    assert count(address) == before


def test_a_digit_too_many_is_422(events: httpx.Client) -> None:
    body = json.dumps(event()).replace('"number": 1', '"number": ' + "1" * 5000)
    reported = problem(events.post("/v1/messages", content=body, headers=JSON), 422)
    assert "not JSON" in reported["detail"]


def test_the_key_of_a_request_is_bounded(events: httpx.Client) -> None:
    for key in (b"k" * 201, b"", b"k\xff", "k\x9f".encode()):
        reported = problem(events.post("/v1/messages", json=event(), headers=[(b"Idempotency-Key", key)]), 422)
        assert "Idempotency-Key" in reported["detail"]
    many = [event(number) for number in range(1000)]
    answer = events.post("/v1/messages", json=many, headers={"Idempotency-Key": "k" * 200})
    assert answer.json()["stored"] == 1000


def test_what_is_at_the_limit_is_stored(events: httpx.Client, address: Address) -> None:
    sent = event(
        id="ü" * 128,
        realm="r" * 256,
        topic="ü" * 512,
        key="k" * 1024,
        publisher_name="p" * 256,
        attributes={f"{number:03}" + "a" * 253: "🦆" * 256 for number in range(100)},
        ts="2261-12-31T23:59:59.999999+00:00",
        body={"old": {}, "new": nested(100) | {"n" * 4096: [-(10**308), 1e-320, "\x00"]}},
    )
    answer = events.post("/v1/messages", json=sent)
    assert answer.status_code == 202, answer.text
    found = read_incoming(address, answer.json()["position"])
    assert json.loads(found["data"]) == {name: value for name, value in sent.items() if name != "id"}
    assert dict(found["headers"])["Purveyor-Id"] == [sent["id"]]


def test_an_id_is_that_of_its_login(events: httpx.Client, api: RunningApi, address: Address, unique: str) -> None:
    shop = api.client("shop", "shop-secret")
    sent = event(realm="shop", id=unique)
    first = events.post("/v1/messages", json=sent).json()
    other = shop.post("/v1/messages", json=sent).json()
    assert (first["duplicate"], other["duplicate"]) == (False, False)
    assert other["position"] != first["position"]
    assert other["id"] == first["id"] == unique
    for client, reported in ((events, first), (shop, other)):
        assert client.post("/v1/messages", json=sent).json() == {**reported, "duplicate": True}
        again = client.post("/v1/messages", json=[sent, event(realm="shop")]).json()
        assert (again["stored"], again["duplicates"]) == (1, 1)
        assert dict(read_incoming(address, reported["position"])["headers"])["Purveyor-Id"] == [unique]


def unfit_requests(name: str) -> list[tuple[str, str, Any]]:
    topics = [{"realm": name, "topic": "t"}]
    wants = {"name": name, "realms_topics": topics, "password": "p"}
    schema = {"name": name, "realms_topics": topics, "definition": {"type": "object"}}
    return [
        ("POST", "/v1/subscriptions", {**wants, "name": HALF}),
        ("POST", "/v1/subscriptions", {**wants, "password": HALF}),
        ("POST", "/v1/subscriptions", {**wants, HALF: 1}),
        ("POST", "/v1/subscriptions", {**wants, "realms_topics": [{"realm": HALF, "topic": "t"}]}),
        ("POST", "/v1/subscriptions", {**wants, "realms_topics": [{"realm": "r", "topic": f"t.*{HALF}"}]}),
        ("POST", "/v1/subscriptions", {**wants, "filter": {"attributes": {HALF: "x"}}}),
        ("POST", "/v1/subscriptions", {**wants, "filter": {"attributes": {"x": HALF}}}),
        ("POST", "/v1/subscriptions", {**wants, "filter": {"fields": {HALF: "x"}}}),
        ("POST", "/v1/subscriptions", {**wants, "filter": {"fields": {"x": [HALF]}}}),
        ("POST", "/v1/subscriptions", {**wants, "hidden_fields": [HALF]}),
        ("POST", "/v1/schemas", {**schema, "definition": {"title": HALF}}),
        ("POST", "/v1/schemas", {**schema, "definition": {"properties": {HALF: {}}}}),
        ("POST", "/v1/schemas", {**schema, "type": "avro", "definition": {"type": "record", "name": HALF}}),
        ("POST", "/v1/topics", {"realm": name, "topic": HALF}),
        ("POST", "/v1/topics", {"realm": name, "topic": "t", "description": HALF}),
        ("POST", "/v1/subscriptions", {**wants, "filter": {"fields": {"x": [float("nan")]}}}),
        ("POST", "/v1/subscriptions", {**wants, "filter": {"fields": {"x": [10**400]}}}),
        ("POST", "/v1/schemas", {**schema, "definition": {"minimum": float("-inf")}}),
        ("POST", "/v1/schemas", {**schema, "definition": {"maximum": 10**400}}),
    ]


def test_what_is_no_text_or_no_number_is_refused_in_every_request(admin: httpx.Client, name: str) -> None:
    for method, path, body in unfit_requests(name):
        answer = admin.request(method, path, content=json.dumps(body), headers=JSON)
        assert answer.status_code == 422, (path, body, answer.text)
        assert problem(answer, 422)["detail"].encode()


def test_an_expression_that_could_run_without_end_is_422_with_the_fault(admin: httpx.Client, name: str) -> None:
    def topics(expression: str) -> list[dict[str, str]]:
        return [{"realm": name, "topic": expression}]

    for expression, fault in (("([a-z]+/)*user", "repeats a group"), (".*a.*b.*c", "too many ways")):
        body: dict[str, Any] = {"name": name, "realms_topics": topics(expression), "password": "p"}
        assert fault in problem(admin.post("/v1/subscriptions", json=body), 422)["detail"]
        body = {"name": name, "realms_topics": topics(expression), "definition": {"type": "object"}}
        assert fault in problem(admin.post("/v1/schemas", json=body), 422)["detail"]
    body = {"name": name, "realms_topics": topics("t"), "definition": {"type": "object"}}
    assert admin.post("/v1/schemas", json=body).status_code == 201
    change = {"realms_topics": topics("(a|b)+")}
    assert "repeats a group" in problem(admin.patch(f"/v1/schemas/{name}", json=change), 422)["detail"]
    assert (
        "topic is 1025 bytes"
        in problem(admin.post("/v1/topics", json={"realm": name, "topic": "t" * 1025}), 422)["detail"]
    )
