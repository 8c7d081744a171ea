"""Publishers see the topics and schemas of their realms, in a list with a limit."""

import asyncio
import logging
from typing import Any

import httpx
import pytest

from purveyor.app import json_views
from purveyor.sources.schemas import registry
from tests.support.nats_servers import OwnServer
from tests.support.running_api import RunningApi, event, problem
from tests.support.waiting import wait_until

OBJECT = {"type": "object"}


def add_schema(admin: httpx.Client, name: str, *realms: str) -> None:
    topics = [{"realm": realm, "topic": "t.*"} for realm in realms]
    body = {"name": name, "realms_topics": topics, "definition": OBJECT}
    assert admin.post("/v1/schemas", json=body).status_code == 201


def test_a_publisher_that_is_bound_to_realms_sees_only_those(
    api: RunningApi, admin: httpx.Client, events: httpx.Client, name: str
) -> None:
    shop = api.client("shop", "shop-secret")
    add_schema(admin, f"{name}-own", "shop")
    add_schema(admin, f"{name}-both", "shop", name)
    add_schema(admin, f"{name}-other", name)
    for realm in ("shop", name):
        assert admin.post("/v1/topics", json={"realm": realm, "topic": f"t-{name}"}).status_code == 201

    def schemas(client: httpx.Client) -> dict[str, Any]:
        return {each["name"]: each for each in client.get("/v1/schemas").json() if each["name"].startswith(name)}

    assert set(schemas(events)) == {f"{name}-own", f"{name}-both", f"{name}-other"}
    assert set(schemas(shop)) == {f"{name}-own", f"{name}-both"}
    both = shop.get(f"/v1/schemas/{name}-both").json()
    assert both["realms_topics"] == [{"realm": "shop", "topic": "t.*"}]
    assert name not in [topic["realm"] for each in schemas(shop).values() for topic in each["realms_topics"]]
    unknown = problem(shop.get(f"/v1/schemas/{name}-none"), 404)
    for path in (f"{name}-other", f"{name}-other/revisions"):
        reported = problem(shop.get(f"/v1/schemas/{path}"), 404)
        assert reported == {**unknown, "detail": unknown["detail"].replace("-none", "-other")}
    problem(shop.post(f"/v1/schemas/{name}-other/check", json={"object": {}}), 404)
    assert shop.post(f"/v1/schemas/{name}-both/check", json={"object": {"a": 1}}).json()["ok"]
    assert shop.get(f"/v1/schemas/{name}-own/revisions").status_code == 200

    assert {each["realm"] for each in shop.get("/v1/topics").json()} == {"shop"}
    assert {each["realm"] for each in events.get("/v1/topics").json()} >= {"shop", name}
    assert shop.get(f"/v1/topics/shop/t-{name}").status_code == 200
    problem(shop.get(f"/v1/topics/{name}/t-{name}"), 404)
    assert events.get(f"/v1/topics/{name}/t-{name}").status_code == 200


def test_events_flow_when_the_list_of_topics_is_full_and_it_says_so(
    own_server: OwnServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registry, "MAX_TOPICS", 3)
    monkeypatch.setattr("purveyor.app.http.topics.MAX_TOPICS", 3)
    address = own_server().address
    with RunningApi(lambda: address) as api, caplog.at_level(logging.WARNING):
        admin, events = api.when_ready().client("admin", "admin-secret"), api.client("events", "events-secret")

        def listed() -> list[str]:
            return [each["topic"] for each in admin.get("/v1/topics").json()]

        assert "Purveyor-Limit-Reached" not in admin.get("/v1/topics").headers
        assert events.post("/v1/messages", json=[event(topic=f"t{n}") for n in range(5)]).json()["stored"] == 5
        wait_until(lambda: len(listed()) == 3)
        assert events.post("/v1/messages", json=event(topic="one more")).status_code == 202
        wait_until(lambda: "the list of known topics is full" in caplog.text)
        assert admin.get("/v1/topics").headers["Purveyor-Limit-Reached"] == "3"
        assert events.post("/v1/messages", json=event(topic="and more")).status_code == 202
        assert caplog.text.count("the list of known topics is full") == 1
        full = problem(admin.post("/v1/topics", json={"realm": "udm", "topic": "declared"}), 422)
        assert "the list of known topics is full: 3" in full["detail"]
        assert admin.post("/v1/topics", json={"realm": "udm", "topic": listed()[0]}).is_success  # it is listed already
        assert admin.delete(f"/v1/topics/udm/{listed()[0]}").status_code == 200
        wait_until(lambda: events.post("/v1/messages", json=event(topic="new")).is_success and "new" in listed())


def test_expressions_do_not_run_in_the_event_loop(
    admin: httpx.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert admin.post("/v1/topics", json={"realm": "shop", "topic": f"t-{name}"}).status_code == 201
    in_event_loop: list[bool] = []
    to_view = json_views._to_view

    def watched(*given: Any) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            in_event_loop.append(False)
        else:
            in_event_loop.append(True)
        return to_view(*given)

    monkeypatch.setattr(json_views, "_to_view", watched)
    assert admin.get("/v1/topics").status_code == 200
    assert in_event_loop
    assert not any(in_event_loop)
