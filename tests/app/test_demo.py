"""The demo verifies itself; here its rules are tested, and once the whole."""

import json

import pytest

from purveyor.app.demo.consumer import Received
from purveyor.app.demo.directory import beginning, changes
from purveyor.delivery.leases import Kind
from purveyor.delivery.pull import Delivered
from tests.app.conftest import invoke


def message(position: int, kind: Kind = Kind.MAIN, uuid: str = "u", *, gone: bool = False) -> Delivered:
    here = {"uuid": uuid, "dn": f"uid={uuid}"}
    body = {"old": here, "new": {}} if gone else {"old": {}, "new": here}
    data = json.dumps({"body": body}).encode()
    return Delivered(
        sequence=position, position=position, kind=kind, data=data, headers={}, num_delivered=1, lease=None, until=None
    )


def test_the_directory_is_the_same_in_every_run() -> None:
    assert changes(beginning(50, 2), 1) == changes(beginning(50, 2), 1)


def test_each_change_is_one_record() -> None:
    step = changes(beginning(50, 2), 1)
    assert step.ldif.count("changetype:") == step.events
    assert len(step.people) == 50 - step.ldif.count("changetype: delete")


def test_what_is_doubled_or_out_of_order_is_noticed() -> None:
    got = Received("x")
    for each in (message(5), message(5), message(4), message(6, uuid="v"), message(7, uuid="v", gone=True)):
        got.take(each)
    got.take(message(1, Kind.PREFILL, "late"))
    assert (got.live, got.doubled, got.disordered) == (5, 1, 3)
    assert set(got.objects) == {"u", "late"}


@pytest.mark.timeout(600)
@pytest.mark.first
def test_the_demo_runs_and_finds_nothing_wrong() -> None:
    done = invoke("demo", "--people", "40", "--json")
    assert done.code == 0, (done.out, done.err)
    told = json.loads(done.out)
    assert told["wrong"] == []
    assert told["audit"]["clean"]
    assert [each["name"] for each in told["received"]] == ["everything", "people"]
