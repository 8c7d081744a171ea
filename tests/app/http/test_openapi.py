"""The OpenAPI document is correct: every request that it allows gets an answer that it describes, never a 5xx."""

import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from purveyor.jetstream.address import Address
from tests.support.running_api import PASSWORD, RunningApi, begin_replay, wanted
from tests.support.scale import LONG, chance

EXAMPLES = int(os.environ.get("PURVEYOR_EXAMPLES") or (200 if LONG else 6))
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="session")
def described(running_api: RunningApi) -> Any:
    answer = running_api.client().get("/openapi.json")
    assert answer.status_code == 200
    return answer.json()


def test_every_route_says_what_it_does_for_whom_and_what_can_go_wrong(described: Any) -> None:
    for path, routes in described["paths"].items():
        for method, route in routes.items():
            where = f"{method} {path}"
            assert route["description"], where
            assert "503" in route["responses"] or path in ("/healthz", "/metrics"), where
            if path.startswith("/v1/"):
                assert "For: " in route["description"], where
                assert route["security"], where
                assert "401" in route["responses"], where


def test_bodies_have_examples_that_are_taken(described: Any, admin: httpx.Client, address: Address, name: str) -> None:
    schemas = described["components"]["schemas"]
    for model in ("NewSubscription", "SubscriptionChange", "StatusReport", "EventBody", "ReplayRequest"):
        assert schemas[model]["examples"], model
    example = schemas["NewSubscription"]["examples"][0] | {"name": name}
    assert admin.post("/v1/subscriptions", json=example).status_code == 201
    for change in schemas["SubscriptionChange"]["examples"]:
        assert admin.patch(f"/v1/subscriptions/{name}", json=change).status_code == 200
    for replay in schemas["ReplayRequest"]["examples"]:
        asked = admin.post(f"/v1/subscriptions/{name}/replay", json=replay)
        assert asked.status_code == 202
        begin_replay(address, name, asked.json()["job"])


@pytest.fixture
def left_behind(admin: httpx.Client) -> Iterator[None]:
    """Created schemas and topics would validate the events of other tests on this server."""
    yield
    for schema in admin.get("/v1/schemas").json():
        admin.delete(f"/v1/schemas/{quote(schema['name'], safe='')}")
    for topic in admin.get("/v1/topics").json():
        if topic["declared"]:
            admin.delete(f"/v1/topics/{quote(topic['realm'], safe='')}/{quote(topic['topic'])}")


@pytest.mark.chaos
@pytest.mark.usefixtures("left_behind")
@pytest.mark.parametrize("login", ["admin", "events", "prefill", "subscription"])
def test_nothing_that_can_be_sent_is_a_5xx(
    described: Any, running_api: RunningApi, admin: httpx.Client, login: str, unique: str
) -> None:
    name = f"fuzz-{unique[-8:]}"
    assert admin.post("/v1/subscriptions", json=wanted(name)).status_code == 201
    auth = (name, PASSWORD) if login == "subscription" else (login, f"{login}-secret")
    schema = schemathesis.openapi.from_dict(described)
    random = chance(f"what is sent by {login}")
    for found in schema.get_all_operations():
        assert isinstance(found, Ok)
        operation = found.ok()

        @seed(random.randrange(2**32))
        @given(case=operation.as_strategy())
        @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), database=None)
        def fuzz(case: Any) -> None:
            parameters = case.path_parameters or {}
            if "name" in parameters and login != "admin":
                case.path_parameters["name"] = name
            if case.operation.path.endswith("/next"):
                case.query = {**(case.query or {}), "timeout": 0}
            if isinstance(case.body, dict) and "timeout" in case.body:
                case.body["timeout"] = 0
            changes_itself = case.method == "DELETE" or "password" in (case.body if isinstance(case.body, dict) else {})
            if changes_itself and login == "subscription":
                return  # it would be locked out for the rest
            case.call_and_validate(base_url=running_api.url, auth=auth, checks=CHECKS, timeout=120)

        fuzz()
