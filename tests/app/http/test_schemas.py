"""The API refuses events that do not fit the schema of their topic and names the field."""

import base64
import io
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fastavro
import httpx
import pytest

from purveyor.jetstream.address import Address
from purveyor.queues.client import connect
from purveyor.sources.schemas.registry import SchemaRegistry
from tests.support.running_api import RunningApi, count, event, problem, read_incoming
from tests.support.waiting import PATIENCE_SECONDS, wait_until

ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {"id": {"type": "string"}, "total": {"type": "number", "minimum": 0}, "lines": {"type": "array"}},
    "required": ["id"],
}
AVRO: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "fields": [{"name": "id", "type": "string"}, {"name": "note", "type": ["null", "string"], "default": None}],
}
WIDER: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "note", "type": ["null", "string"], "default": None},
        {"name": "id", "type": ["null", "string"]},
    ],
}


def add(admin: httpx.Client, name: str, definition: Any = ORDER, topic: str = "orders", **more: Any) -> httpx.Response:
    body = {"name": name, "realms_topics": [{"realm": name, "topic": topic}], "definition": definition, **more}
    return admin.post("/v1/schemas", json=body)


def order(realm: str, new: Any, **more: Any) -> dict[str, Any]:
    return event(realm=realm, topic="orders", body={"new": new}, **more)


def binary(definition: Any, value: Any) -> str:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, definition, value)
    return base64.b64encode(stream.getvalue()).decode()


def test_a_publish_that_does_not_fit_is_refused_with_the_place(
    admin: httpx.Client, events: httpx.Client, address: Address, name: str
) -> None:
    assert add(admin, name).status_code == 201
    assert events.post("/v1/messages", json=order(name, {"id": "1", "total": 2})).status_code == 202
    before = count(address)
    reported = problem(events.post("/v1/messages", json=order(name, {"id": 7, "total": -1})), 422)
    assert [each["where"] for each in reported["errors"]] == ["body.new.id", "body.new.total"]
    assert reported["detail"].startswith("body.new.id: ")
    assert f"schema {name!r}, revision 1" in reported["detail"]
    assert count(address) == before
    deletion = event(realm=name, topic="orders", body={"old": {"anything": 1}})
    assert events.post("/v1/messages", json=deletion).status_code == 202
    assert events.post("/v1/messages", json={**order(name, {"id": 7}), "topic": "other"}).status_code == 202


def test_one_that_does_not_fit_keeps_all_of_its_request_out(
    admin: httpx.Client, events: httpx.Client, address: Address, name: str
) -> None:
    add(admin, name)
    before = count(address)
    many = [order(name, {"id": "1"}), order(name, {"id": "2"}), order(name, {"total": "secret"})]
    reported = problem(events.post("/v1/messages", json=many), 422)
    assert reported["detail"].startswith("event 3: body.new")
    assert {each["where"].partition(":")[0] for each in reported["errors"]} == {"event 3"}
    assert "secret" not in str(reported), "a value may be a password"
    assert count(address) == before
    assert events.post("/v1/messages", json=many[:2]).json()["stored"] == 2


def test_a_revision_is_compatible_or_refused_and_can_be_rolled_back(
    admin: httpx.Client, events: httpx.Client, name: str
) -> None:
    add(admin, name)
    path = f"/v1/schemas/{name}"
    narrower = {**ORDER, "required": ["id", "total"]}
    reported = problem(admin.post(f"{path}/revisions", json={"definition": narrower}), 409)
    assert "total is required now" in reported["detail"]
    assert admin.post(f"{path}/check", json={"definition": narrower}).json()["ok"] is False
    wider = {**ORDER, "properties": {**ORDER["properties"], "id": {"type": ["string", "integer"]}}}
    assert admin.post(f"{path}/check", json={"definition": wider}).json() == {"ok": True, "problems": []}
    assert admin.post(f"{path}/revisions", json={"definition": wider}).status_code == 201
    assert admin.post(f"{path}/revisions", json={"definition": wider}).status_code == 200
    assert events.post("/v1/messages", json=order(name, {"id": 7})).status_code == 202
    assert admin.post(f"{path}/rollback", json={"revision": 1}).json()["revision"] == 3
    assert events.post("/v1/messages", json=order(name, {"id": 7})).status_code == 422
    revisions = admin.get(f"{path}/revisions").json()
    assert [(each["number"], each.get("copy_of")) for each in revisions] == [(1, None), (2, None), (3, 1)]
    problem(admin.delete(f"{path}/revisions/3"), 422)
    assert admin.delete(f"{path}/revisions/2").status_code == 200
    assert admin.patch(path, json={"compatibility": "none"}).json()["compatibility"] == "none"
    assert admin.post(f"{path}/revisions", json={"definition": narrower}).json()["revision"] == 4
    assert admin.delete(path).status_code == 200
    assert events.post("/v1/messages", json=order(name, {"id": 7})).status_code == 202
    problem(admin.get(path), 404)


def test_adding_the_same_again_is_no_change_and_another_is_a_conflict(admin: httpx.Client, name: str) -> None:
    assert [add(admin, name).status_code for _ in range(2)] == [201, 200]
    problem(add(admin, name, {"type": "object"}), 409)
    problem(add(admin, f"{name}-bad", {"type": "nothing"}), 422)
    problem(add(admin, f"{name}-away", {"$ref": "http://127.0.0.1:1/x.json"}), 422)
    problem(add(admin, f"{name}-pattern", topic="("), 422)
    problem(add(admin, f"{name}-binary", encoding="binary"), 422)
    assert admin.get(f"/v1/schemas/{name}").json()["revisions"] == [1]


def test_avro_in_json_takes_what_the_newest_revision_can_read(
    admin: httpx.Client, events: httpx.Client, name: str
) -> None:
    add(admin, name, AVRO, type="avro")
    fits = {"id": "1", "note": {"string": "x"}}
    assert events.post("/v1/messages", json=order(name, fits)).status_code == 202
    assert events.post("/v1/messages", json=order(name, {"id": "1"})).status_code == 202
    reported = problem(events.post("/v1/messages", json=order(name, {"id": "1", "note": "x"})), 422)
    assert [each["where"] for each in reported["errors"]] == ["body.new.note"]
    assert admin.post(f"/v1/schemas/{name}/revisions", json={"definition": WIDER}).status_code == 201
    assert events.post("/v1/messages", json=order(name, {"id": {"string": "1"}})).status_code == 202
    assert events.post("/v1/messages", json=order(name, fits)).status_code == 202, "as revision 1 had it"
    told_one = order(name, fits, attributes={"schema-revision": "2"})
    assert events.post("/v1/messages", json=told_one).status_code == 422


def test_binary_avro_is_stored_as_the_object_that_it_means(
    admin: httpx.Client, events: httpx.Client, address: Address, name: str
) -> None:
    add(admin, name, AVRO, type="avro", encoding="binary")
    sent = order(name, binary(AVRO, {"id": "1", "note": "x"}))
    answer = events.post("/v1/messages", json=sent)
    assert answer.status_code == 202
    stored = httpx.Response(200, content=read_incoming(address, answer.json()["position"])["data"]).json()
    assert stored["body"] == {"old": {}, "new": {"id": "1", "note": {"string": "x"}}}
    for wrong in ("", "!", base64.b64encode(b"\xff" * 20).decode(), sent["body"]["new"] + "AAAA", {"id": "1"}):
        reported = problem(events.post("/v1/messages", json=order(name, wrong)), 422)
        assert (
            "body.new" in reported["detail"] or "neither" in reported["detail"] or "empty string" in reported["detail"]
        )
    assert admin.post(f"/v1/schemas/{name}/revisions", json={"definition": WIDER}).status_code == 201
    by_first = {**sent, "attributes": {"schema-revision": "1"}}
    assert events.post("/v1/messages", json=by_first).status_code == 202
    assert events.post("/v1/messages", json=sent).status_code == 422, "for the newest it means something else"
    problem(events.post("/v1/messages", json={**sent, "attributes": {"schema-revision": "9"}}), 422)


def test_what_bytes_could_let_grow_without_end_has_no_binary_form(admin: httpx.Client, name: str) -> None:
    deep: Any = {"type": "record", "name": "L", "fields": [{"name": "next", "type": ["null", "L"]}]}
    empty: Any = {"type": "record", "name": "L", "fields": [{"name": "a", "type": {"type": "array", "items": "null"}}]}
    for definition in (deep, empty):
        assert (
            "no safe binary form"
            in problem(add(admin, name, definition, type="avro", encoding="binary"), 422)["detail"]
        )
        assert add(admin, f"{name}-{definition['fields'][0]['name']}", definition, type="avro").status_code == 201


async def test_what_another_process_adds_counts_within_a_moment(
    admin: httpx.Client, events: httpx.Client, address: Address, name: str
) -> None:
    add(admin, name)
    async with connect(address) as queues:
        await SchemaRegistry(queues).commit(name, {**ORDER, "properties": {}})
        wait_until(lambda: events.post("/v1/messages", json=order(name, {"id": 7})).status_code == 202)
        await SchemaRegistry(queues).delete(name)
        wait_until(lambda: events.post("/v1/messages", json=order(name, {})).status_code == 422)
        wait_until(lambda: events.post("/v1/messages", json=order(name, {"total": -1})).status_code == 202)


def test_topics_are_known_when_declared_or_seen(
    api: RunningApi, admin: httpx.Client, events: httpx.Client, name: str
) -> None:
    add(admin, name, topic="ord.*")
    wanted = {"name": name, "realms_topics": [{"realm": name, "topic": "o.*"}], "password": "x"}
    assert admin.post("/v1/subscriptions", json=wanted).status_code == 201
    assert events.post("/v1/messages", json=order(name, {"id": "1"})).status_code == 202
    seen = wait_until(lambda: [each for each in events.get("/v1/topics").json() if each["realm"] == name])
    assert [(each["topic"], each["declared"], each["subscriptions"]) for each in seen] == [("orders", False, [name])]
    assert seen[0]["schema"] == {"name": name, "revision": 1}
    declared = {"realm": name, "topic": "users/user ü", "description": "People", "strict": True}
    assert [admin.post("/v1/topics", json=declared).status_code for _ in range(2)] == [201, 200]
    one = admin.get(f"/v1/topics/{name}/users/user ü").json()
    assert (one["description"], one["schema"], one["subscriptions"]) == ("People", None, [])
    reported = problem(events.post("/v1/messages", json=order(name, {"id": "1"})), 422)
    assert reported["errors"][0]["where"] == "topic"
    person = {**order(name, {"id": "1"}), "topic": "users/user ü"}
    assert events.post("/v1/messages", json=person).status_code == 202
    assert admin.delete(f"/v1/topics/{name}/users/user ü").status_code == 200
    problem(admin.delete(f"/v1/topics/{name}/users/user ü"), 404)
    assert events.post("/v1/messages", json=order(name, {"id": "1"})).status_code == 202
    problem(events.post("/v1/topics", json=declared), 403)
    problem(events.post("/v1/schemas", json={"name": "x", "realms_topics": [declared], "definition": {}}), 422)
    consumer = api.client(name, "x")
    problem(consumer.get("/v1/schemas"), 403)


def test_an_exact_topic_goes_before_an_expression_and_the_longer_one_first(
    admin: httpx.Client, events: httpx.Client, name: str
) -> None:
    def one_of(kind: str, topic: str, suffix: str) -> None:
        body = {"name": f"{name}-{suffix}", "realms_topics": [{"realm": name, "topic": topic}]}
        definition = {"properties": {"id": {"type": kind}}}
        assert admin.post("/v1/schemas", json={**body, "definition": definition}).status_code == 201

    def takes(value: Any) -> bool:
        return events.post("/v1/messages", json=order(name, {"id": value})).status_code == 202

    one_of("integer", ".*", "a")
    assert (takes(1), takes("x"), takes(True)) == (True, False, False)
    one_of("string", "ord.*", "b")
    assert (takes(1), takes("x"), takes(True)) == (False, True, False)
    one_of("boolean", "orders", "c")
    assert (takes(1), takes("x"), takes(True)) == (False, False, True)


@pytest.mark.parametrize("given", [{}, {"definition": {}, "object": {}}])
def test_one_question_at_a_time(admin: httpx.Client, name: str, given: Any) -> None:
    add(admin, name)
    problem(admin.post(f"/v1/schemas/{name}/check", json=given), 422)
    answer = admin.post(f"/v1/schemas/{name}/check", json={"object": {"id": 1}}).json()
    assert answer == {"ok": False, "problems": ['id: the value is not of type "string"']}


def test_others_are_served_while_a_definition_is_checked(
    admin: httpx.Client, api: RunningApi, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(admin, name)
    begun, go_on = threading.Event(), threading.Event()

    def slow(*_: object) -> tuple[str, ...]:
        begun.set()
        assert go_on.wait(PATIENCE_SECONDS)
        return ()

    monkeypatch.setattr("purveyor.sources.schemas.registry.find_incompatibilities", slow)
    with ThreadPoolExecutor(2) as threads:
        asked = {"definition": {"type": "object"}}
        check = threads.submit(admin.post, f"/v1/schemas/{name}/check", json=asked)
        try:
            assert begun.wait(PATIENCE_SECONDS)
            assert api.client().get("/healthz", timeout=20).status_code == 200
        finally:
            go_on.set()
        assert check.result().json() == {"ok": True, "problems": []}
        begun.clear()
        go_on.clear()
        commit = threads.submit(admin.post, f"/v1/schemas/{name}/revisions", json=asked)
        try:
            assert begun.wait(PATIENCE_SECONDS)
            assert api.client().get("/healthz", timeout=20).status_code == 200
        finally:
            go_on.set()
        assert commit.result().status_code == 201
