"""The reference libraries of each format can read and verify the requests of push."""

import base64
import ipaddress
import json
import socket
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_http
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from standardwebhooks import Webhook, WebhookVerificationError

from purveyor.app.subscription_input import PushInput
from purveyor.delivery.push.egress_policy import check_endpoint, is_public, parse_ranges, resolve
from purveyor.delivery.push.endpoint_pool import EndpointHealth, EndpointSender
from purveyor.delivery.push.http_pool import HostPool
from purveyor.delivery.push.push_request import (
    KEY_FILE_NAME,
    PushSecrets,
    SecretCipher,
    generate_secret,
    parse_signing_key,
)
from purveyor.delivery.transitions import DeliveredMessage
from purveyor.model.delivery_policy import (
    HIDDEN,
    SECRET_PREFIX,
    AfterDeadLetter,
    Delivery,
    Endpoint,
    OrderBy,
    Push,
    PushFormat,
)
from purveyor.model.delivery_state import SubjectKind
from purveyor.model.errors import InvalidConfig, InvalidInput, Refused, Unavailable
from purveyor.model.message_headers import EVENT_ID
from purveyor.model.registration import Record
from purveyor.model.subscription import RealmTopic, Subscription

URL = "https://shop.example/in"
NOWHERE = cast("HostPool", None)
"""Nothing is sent in these tests."""
EVENT = {
    "publisher_name": "t",
    "ts": "2026-01-01T00:00:00+00:00",
    "realm": "shop",
    "topic": "orders/order",
    "body": {"old": {}, "new": {"uuid": "o-1", "städt": "Köln"}},
    "attributes": {"tenant": "north", "Odd Name": "a\r\nb: c"},
}


def message(event: dict[str, Any] | bytes = EVENT, **more: Any) -> DeliveredMessage:
    data = event if isinstance(event, bytes) else json.dumps(event).encode()
    given: dict[str, Any] = {"headers": {EVENT_ID: ("e-1",)}, "num_delivered": 2, "position": 7, **more}
    return DeliveredMessage(sequence=3, kind=SubjectKind.MAIN, data=data, lease=None, until=None, **given)


def request(
    push: Push, found: DeliveredMessage, cipher: SecretCipher | None = None
) -> tuple[str, dict[str, str], bytes]:
    sender = EndpointSender(push.targets[0], EndpointHealth(), NOWHERE)
    sender.configure("orders", push, PushSecrets.decrypt(push, cipher or SecretCipher("A" * 43 + "=")))
    head, _, body = sender.build_request(found).partition(b"\r\n\r\n")
    line, *lines = head.decode("ascii").split("\r\n")
    headers = dict(each.split(": ", 1) for each in lines)
    assert int(headers["content-length"]) == len(body)
    return line, headers, body


def test_the_wrapped_form_is_that_of_pubsub() -> None:
    line, headers, body = request(Push(endpoints=(URL,)), message())
    assert line == "POST /in HTTP/1.1"
    assert headers["host"] == "shop.example"
    parsed = json.loads(body)
    assert json.loads(base64.b64decode(parsed["message"].pop("data"))) == EVENT
    assert parsed == {
        "message": {
            "attributes": {"realm": "shop", "topic": "orders/order", "tenant": "north", "Odd Name": "a\r\nb: c"},
            "messageId": "e-1@7",
            "publishTime": "2026-01-01T00:00:00+00:00",
            "orderingKey": "o-1",
        },
        "subscription": "orders",
        "deliveryAttempt": 2,
    }


def test_the_raw_form_is_the_event_and_headers() -> None:
    _, headers, body = request(Push(endpoints=(URL,), format=PushFormat.RAW), message())
    assert json.loads(body) == EVENT
    about = {name.removeprefix("x-purveyor-"): value for name, value in headers.items() if name.startswith("x-purv")}
    assert about == {
        "id": "e-1@7",
        "subscription": "orders",
        "realm": "shop",
        "topic": "orders/order",
        "time": "2026-01-01T00:00:00+00:00",
        "attempt": "2",
        "position": "7",
        "key": "o-1",
        "attribute-tenant": "north",
        "attribute-Odd%20Name": "a%0D%0Ab:%20c",
    }


def test_the_cloud_event_is_read_by_their_library() -> None:
    _, headers, body = request(Push(endpoints=(URL,), format=PushFormat.CLOUDEVENTS), message())
    event = from_http(HTTPMessage(headers=headers, body=body), JSONFormat(), CloudEvent)
    assert event.get_id() == "e-1@7"
    assert event.get_type() == "shop.orders.order"
    assert event.get_source() == "/shop/orders/order"
    assert event.get_subject() == "o-1"
    assert event.get_time() == datetime(2026, 1, 1, tzinfo=UTC)
    assert event.get_data() == EVENT
    assert event.get_extension("tenant") == "north"
    assert event.get_extension("position") == "7"


@pytest.mark.parametrize("form", list(PushFormat))
def test_events_of_two_logins_with_the_same_id_have_different_ids_at_the_endpoint(form: PushFormat) -> None:
    def identity(position: int) -> str:
        _, headers, body = request(Push(endpoints=(URL,), format=form), message(position=position))
        if form is PushFormat.PUBSUB:
            return str(json.loads(body)["message"]["messageId"])
        return headers["x-purveyor-id" if form is PushFormat.RAW else "ce-id"]

    assert identity(7) == identity(7) != identity(8)


@pytest.mark.parametrize("form", [PushFormat.RAW, PushFormat.CLOUDEVENTS])
def test_an_id_is_encoded_once_in_every_header(form: PushFormat) -> None:
    given = "100% ä"
    _, headers, _ = request(Push(endpoints=(URL,), format=form), message(headers={EVENT_ID: (given,)}))
    encoded = {headers[name] for name in ("webhook-id", "x-purveyor-id", "ce-id") if name in headers}
    assert {unquote(each) for each in encoded} == {f"{given}@7"}
    assert len(encoded) == 1


@pytest.mark.parametrize("form", PushFormat)
@pytest.mark.parametrize(
    "data", [b"", b"\xff\xfe", b"[]", b'{"body": 3, "attributes": [], "key": 7}', b'{"realm": "\\n"}']
)
def test_a_body_that_is_not_an_event_is_sent_too(form: PushFormat, data: bytes) -> None:
    _, _, body = request(Push(endpoints=(URL,), format=form), message(data, headers={}))
    assert data in (body, base64.b64decode(json.loads(body)["message"]["data"]) if body[:10] == b'{"message"' else body)


def test_signatures_are_verified_by_the_standard_library_with_either_secret_while_one_is_changed() -> None:
    cipher = SecretCipher("A" * 43 + "=")
    old, new = generate_secret(), generate_secret()
    soon = datetime.now(UTC) + timedelta(hours=1)
    push = Push(endpoints=(URL,), secret=cipher.encrypt(new), old_secret=cipher.encrypt(old), old_secret_until=soon)
    for form in (PushFormat.PUBSUB, PushFormat.RAW):
        _, headers, body = request(Push(**{**_fields(push), "format": form}), message(), cipher)
        for secret in (old, new):
            assert Webhook(secret).verify(body, headers) == json.loads(body)
        with pytest.raises(WebhookVerificationError):
            Webhook(generate_secret()).verify(body, headers)
        with pytest.raises(WebhookVerificationError):
            Webhook(new).verify(body + b" ", headers)
    past = Push(**{**_fields(push), "old_secret_until": datetime.now(UTC) - timedelta(seconds=1)})
    _, headers, body = request(past, message(), cipher)
    Webhook(new).verify(body, headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(old).verify(body, headers)


def test_a_secret_ends_when_its_time_is_over_without_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    cipher = SecretCipher("A" * 43 + "=")
    soon = datetime.now(UTC) + timedelta(hours=1)
    push = Push(
        endpoints=(URL,),
        secret=cipher.encrypt(generate_secret()),
        old_secret=cipher.encrypt(generate_secret()),
        old_secret_until=soon,
    )
    sender = EndpointSender(push.targets[0], EndpointHealth(), NOWHERE)
    sender.configure("orders", push, PushSecrets.decrypt(push, cipher))
    assert sender.build_request(message()).count(b"v1,") == 2
    monkeypatch.setattr("purveyor.delivery.push.endpoint_pool.time.time", soon.timestamp)
    assert sender.build_request(message()).count(b"v1,") == 1


def _fields(push: Push) -> dict[str, Any]:
    return {name: getattr(push, name) for name in Push.__slots__}


def test_a_bearer_token_is_sent_and_one_that_breaks_out_of_its_header_is_refused() -> None:
    cipher = SecretCipher("A" * 43 + "=", {f"{SECRET_PREFIX}TOKEN": "abc", f"{SECRET_PREFIX}BAD": "a\r\nx: y"})
    _, headers, _ = request(Push(endpoints=(URL,), bearer_token=f"env:{SECRET_PREFIX}TOKEN"), message(), cipher)
    assert headers["authorization"] == "Bearer abc"
    with pytest.raises(InvalidInput):
        PushSecrets.decrypt(Push(endpoints=(URL,), bearer_token=f"env:{SECRET_PREFIX}BAD"), cipher)
    with pytest.raises(InvalidInput, match="NONE"):
        PushSecrets.decrypt(Push(endpoints=(URL,), bearer_token=f"env:{SECRET_PREFIX}NONE"), cipher)


def test_the_key_is_for_its_owner_alone_and_another_opens_nothing(tmp_path: Path) -> None:
    cipher = SecretCipher.from_directory(tmp_path / "data")
    file = tmp_path / "data" / KEY_FILE_NAME
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    sealed = cipher.encrypt("whsec_x")
    assert "whsec_x" not in sealed
    assert SecretCipher.from_directory(tmp_path / "data").decrypt(sealed) == "whsec_x"
    with pytest.raises(InvalidInput, match="another key"):
        SecretCipher.from_directory(tmp_path / "other").decrypt(sealed)
    with pytest.raises(InvalidConfig):
        SecretCipher("short")
    assert [each.name for each in (tmp_path / "data").iterdir()] == [KEY_FILE_NAME]


@pytest.mark.parametrize(
    "secret",
    [
        "",
        "whsec_",
        "whsec_!!!",
        "whsec_QUJD",
        "QUJDREVGR0hJSktMTU5PUFFSU1RVVldY",
        pytest.param(generate_secret(), id="new"),
    ],
)
def test_only_a_long_enough_secret_is_one(secret: str) -> None:
    if secret.startswith("whsec_") and len(secret) > 40:
        assert len(parse_signing_key(secret)) == 32
    else:
        with pytest.raises(InvalidInput):
            parse_signing_key(secret)


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1",
        "10.1.2.3",
        "192.168.0.1",
        "172.16.0.1",
        "169.254.169.254",
        "0.0.0.0",
        "100.64.0.1",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1",
        "fd00::1",
        "ff02::1",
        "::ffff:10.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "2001:db8::1",
    ],
)
def test_special_addresses_are_not_public(text: str) -> None:
    assert not is_public(ipaddress.ip_address(text))
    host = f"[{text}]" if ":" in text else text
    with pytest.raises(InvalidInput):
        check_endpoint(f"https://{host}/", ())
    check_endpoint(f"http://{host}/", parse_ranges([text]))


def test_without_tls_only_listed_addresses_are_reached() -> None:
    check_endpoint("https://93.184.216.34/", ())
    for url in ("http://93.184.216.34/", "http://shop.example/"):
        with pytest.raises(InvalidInput, match="not encrypted"):
            check_endpoint(url, ())


@pytest.mark.parametrize("host", ["localhost", "127.1", "0x7f000001", "2130706433"])
async def test_a_host_name_is_checked_by_its_addresses(host: str) -> None:
    with pytest.raises(Refused):
        await resolve(Endpoint.parse(f"https://{host}/"), ())
    with pytest.raises(Unavailable):
        await resolve(Endpoint.parse("https://no-such-name.invalid/"), ())


async def test_one_private_address_among_public_ones_is_enough_to_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(*_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 443)) for each in ("93.184.216.34", "10.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", answers)
    with pytest.raises(Refused, match=r"10\.0\.0\.1"):
        await resolve(Endpoint.parse("https://shop.example/"), ())
    assert len(await resolve(Endpoint.parse("https://shop.example/"), parse_ranges(["10.0.0.0/8"]))) == 2


@pytest.mark.parametrize(
    "url",
    [
        "",
        "shop.example",
        "ftp://shop.example/",
        "https:///x",
        "https://u:p@shop.example/",
        "https://shop.example/#x",
        "https://shop.example:0/",
        "https://shop.example:99999/",
        "https://shop example/",
        "https://köln.example/",
        "https://shop.example/\r\nx: y",
        "https://[::1",
        "https://" + "a" * 3000,
    ],
)
def test_what_is_no_endpoint_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput):
        Push(endpoints=(url,))


def _subscription(push: Push | None, **more: Any) -> Subscription:
    return Subscription(name="shop", realms_topics=(RealmTopic("shop", ".*"),), push=push, **more)


def test_a_definition_with_push_comes_back_as_it_was_and_shows_no_secret() -> None:
    cipher = SecretCipher("A" * 43 + "=")
    push = Push(
        endpoints=(URL, "https://b.example/"),
        ack_deadline_seconds=3,
        format=PushFormat.RAW,
        after_dead_letter=AfterDeadLetter.PARK_KEY,
        secret=cipher.encrypt("a"),
        old_secret="env:OLD",
        old_secret_until=datetime(2026, 1, 1, tzinfo=UTC),
        bearer_token=cipher.encrypt("b"),
    )
    found = _subscription(push, delivery=Delivery.PUSH, order_by=OrderBy.KEY)
    assert Subscription.from_json(found.to_json()) == found
    shown = found.to_public_json()["push"]
    assert (shown["secret"], shown["old_secret"], shown["bearer_token"]) == (HIDDEN, "env:OLD", HIDDEN)
    assert "sealed" not in json.dumps(found.to_public_json()) + repr(found)
    record = Record(incarnation="i", definition=found, created=datetime(2026, 1, 1, tzinfo=UTC), pause_reason="gone")
    assert Record.from_json(record.to_json()) == record


def test_contradictions_are_refused() -> None:
    push = Push(endpoints=(URL,))
    for broken in (
        lambda: _subscription(None, delivery=Delivery.PUSH, order_by=None),
        lambda: _subscription(push),
        lambda: _subscription(
            Push(endpoints=(URL,), after_dead_letter=AfterDeadLetter.PARK_KEY), delivery=Delivery.PUSH, order_by=None
        ),
        lambda: Push(endpoints=()),
        lambda: Push(endpoints=(URL,), ack_deadline_seconds=0),
        lambda: Push(endpoints=(URL,), secret="whsec_in-plain-text"),
        lambda: Push(endpoints=(URL,), old_secret="env:A"),
        lambda: Push.from_json({"endpoint": URL, "endpoints": [URL]}),
        lambda: Push.from_json({"endpoint": URL, "formt": "raw"}),
    ):
        with pytest.raises(InvalidInput):
            broken()


def test_a_secret_that_is_given_again_keeps_its_reference_and_a_new_one_leaves_the_old_one_valid() -> None:
    cipher = SecretCipher("A" * 43 + "=")
    push_input = PushInput(lambda: cipher)
    one, two = generate_secret(), generate_secret()
    first = push_input.parse_new({"endpoint": URL, "secret": one})
    assert push_input.parse_new({"endpoint": URL, "secret": one}, first) == first
    assert push_input.parse_change({"ack_deadline_seconds": 5}, first).secret == first.secret
    assert push_input.parse_change({"secret": HIDDEN}, first) == first
    second = push_input.parse_change({"secret": two, "secret_grace_seconds": 60}, first)
    assert second.secret is not None
    assert (cipher.decrypt(second.secret), second.old_secret) == (two, first.secret)
    at_once = push_input.parse_change({"secret": two, "secret_grace_seconds": 0}, first)
    assert at_once.old_secret is None
    assert push_input.parse_change({"secret": None}, second).secret is None
    assert push_input.parse_change({"endpoints": [URL, f"{URL}/b"]}, first).endpoints == (URL, f"{URL}/b")
    for wrong in ({"secret": "sealed:abc"}, {"secret": "plain"}, {"endpoint": "http://10.0.0.1/"}):
        with pytest.raises(InvalidInput):
            push_input.parse_change(wrong, first)
    with pytest.raises(InvalidInput):
        push_input.parse_new({"endpoint": URL, "secret": HIDDEN})
    with pytest.raises(InvalidInput, match=SECRET_PREFIX):
        PushInput().parse_new({"endpoint": URL, "secret": one})


@pytest.mark.parametrize("name", ["PATH", "PURVEYOR_ADMIN_PASSWORD", "PURVEYOR_PUSH_KEY", SECRET_PREFIX])
def test_other_variables_of_the_push_worker_cannot_be_named(name: str) -> None:
    """Neither in what is asked for, nor by a worker that meets them in a definition of an older version."""
    environment = {name: "a secret of the worker"}
    push_input = PushInput(lambda: SecretCipher("A" * 43 + "=", environment))
    for field in ("secret", "bearer_token"):
        with pytest.raises(InvalidInput, match=f"{name} is not allowed as a secret") as refused:
            push_input.parse_new({"endpoint": URL, field: f"env:{name}"})
        assert SECRET_PREFIX in str(refused.value.fix)
    older = Push.from_json({"endpoint": URL, "bearer_token": f"env:{name}"})
    assert push_input.parse_change({"ack_deadline_seconds": 5}, older).bearer_token == f"env:{name}"
    with pytest.raises(InvalidInput, match="is not allowed as a secret"):
        PushSecrets.decrypt(older, push_input.cipher())


@pytest.mark.parametrize(
    "there", ["https://other.example/events", "https://shop.example:8443/events", "http://shop.example/events"]
)
def test_a_secret_does_not_follow_an_endpoint_to_another_host(there: str) -> None:
    cipher = SecretCipher("A" * 43 + "=")
    push_input = PushInput(lambda: cipher, parse_ranges(["192.0.2.0/24"]))
    here = "https://shop.example/events"
    first = push_input.parse_new({"endpoint": here, "secret": generate_secret(), "bearer_token": "token"})
    for given in ({"endpoint": there}, {"endpoints": [here, there]}, {"endpoint": there, "bearer_token": HIDDEN}):
        with pytest.raises(InvalidInput, match="secret and bearer_token would be sent there"):
            push_input.parse_change(given, first)
        with pytest.raises(InvalidInput):
            push_input.parse_new(given | {"secret": HIDDEN}, first)
    with pytest.raises(InvalidInput, match="and bearer_token would be sent there"):
        push_input.parse_change({"endpoint": there, "secret": generate_secret()}, first)
    assert push_input.parse_change({"endpoint": f"{here}/elsewhere"}, first).secret == first.secret
    assert push_input.parse_change({"endpoint": "https://SHOP.example:443/"}, first).bearer_token == first.bearer_token
    moved = push_input.parse_change({"endpoint": there, "secret": generate_secret(), "bearer_token": None}, first)
    assert (moved.bearer_token, moved.old_secret) == (None, None)
    again = push_input.parse_change(
        {"endpoints": [here, there], "secret": generate_secret(), "bearer_token": "token"}, first
    )
    assert (cipher.decrypt(str(again.bearer_token)), again.old_secret) == ("token", None)


def test_a_variable_and_an_old_secret_do_not_follow_either() -> None:
    cipher = SecretCipher("A" * 43 + "=")
    push_input = PushInput(lambda: cipher)
    there = "https://other.example/"
    named = push_input.parse_new({"endpoint": URL, "bearer_token": f"env:{SECRET_PREFIX}SHOP"})
    with pytest.raises(InvalidInput, match="bearer_token would be sent there"):
        push_input.parse_change({"endpoint": there}, named)
    assert (
        push_input.parse_change({"endpoint": there, "bearer_token": named.bearer_token}, named).bearer_token is not None
    )
    twice = push_input.parse_change(
        {"secret": generate_secret()}, push_input.parse_new({"endpoint": URL, "secret": generate_secret()})
    )
    assert twice.old_secret is not None
    assert push_input.parse_change({"endpoint": there, "secret": generate_secret()}, twice).old_secret is None
