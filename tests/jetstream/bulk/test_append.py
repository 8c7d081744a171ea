"""`append_once` stores each row once, in order, after the stored rows; a refusal affects only its target."""

import json
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from purveyor.jetstream.address import Address
from purveyor.jetstream.api import ErrorReply
from purveyor.jetstream.bulk import (
    AppendOptions,
    Outcome,
    Refusal,
    RefusalKind,
    Target,
    append_once,
    newest_position,
    outgoing,
    publish_many,
)
from purveyor.jetstream.bulk.replies import RefusalAction, decide_action
from purveyor.jetstream.headers import POSITION
from purveyor.model.errors import InvalidConfig, InvalidInput, ServerUnavailable, UnknownStream
from tests.support.append import BATCHED, CHAINED, choose_write_mode, limit_batch_rows, make, one, stored, table
from tests.support.bulk_messages import rows
from tests.support.bulk_servers import Server, make_stream, request_api, serving, state
from tests.support.forgetting import forget_ids_now

HEADERS = pa.map_(pa.string(), pa.list_(pa.string()))


@pytest.fixture(params=[CHAINED, BATCHED], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    chosen: str = request.param
    choose_write_mode(chosen, monkeypatch)
    return chosen


@pytest.mark.parametrize("count", [1, 2, 5, 30, 100, 1000, 1001, 4500])
def test_rows_are_stored_in_order_and_again_only_skipped(address: Address, name: str, count: int) -> None:
    target = make(address, name)
    positions = range(10, 10 + 3 * count, 3)
    for expected in (Outcome(target, count, 0, positions[-1]), Outcome(target, 0, count, positions[-1])):
        assert append_once(address, [(target, table(positions))]) == [expected]
        assert stored(address, name) == list(positions)


def test_a_later_call_continues_after_the_stored_rows(address: Address, name: str) -> None:
    target = make(address, name)
    append_once(address, [(target, table(range(1, 1501)))])
    outcome = one(append_once(address, [(target, table(range(1001, 3001)))]))
    assert outcome == Outcome(target, 1500, 500, 3000)
    assert stored(address, name) == list(range(1, 3001))


@pytest.mark.parametrize("ids", [True, False])
def test_nothing_is_stored_twice_when_message_ids_are_forgotten(address: Address, name: str, ids: bool) -> None:
    target = make(address, name, duplicate_window=100_000_000)
    given = table(range(1, 1201), ids=ids)
    append_once(address, [(target, given)])
    forget_ids_now(address, name, f"{name}.probe")
    assert one(append_once(address, [(target, given)])).skipped == 1200
    assert state(address, name)["messages"] == 1200


def test_what_was_acknowledged_and_deleted_is_not_written_again(address: Address, name: str) -> None:
    make_stream(address, f"KV_{name}", [f"$KV.{name}.>"])
    make_stream(address, name, allow_atomic=True, duplicate_window=100_000_000)
    target = Target(
        subject=f"{name}.main",
        stream=name,
        floor_subject=f"$KV.{name}.ox",
        floor_stream=f"KV_{name}",
        floor_tag="second",
    )
    assert one(append_once(address, [(target, table(range(1, 101)))])).stored == 100
    for tag, position in (("second", 100), ("first", 200)):
        body = json.dumps({"incarnation": tag, "position": position}).encode()
        publish_many(address, outgoing([(f"$KV.{name}.ox", body, None, None)]))
        request_api(address, f"STREAM.PURGE.{name}", {})
        forget_ids_now(address, name, f"{name}.probe")
        outcome = one(append_once(address, [(target, table(range(1, 151)))]))
        assert outcome.stored == (50 if tag == "second" else 150), "a floor of another incarnation is none"
    publish_many(address, outgoing([(f"$KV.{name}.ox", b"", {"KV-Operation": "DEL"}, None)]))
    assert one(append_once(address, [(target, table(range(1, 152)))])) == Outcome(target, 1, 150, 151)


def test_a_floor_given_by_the_caller_counts(address: Address, name: str) -> None:
    make_stream(address, name, allow_atomic=True)
    target = Target(subject=f"{name}.main", stream=name, floor=7)
    assert one(append_once(address, [(target, table(range(1, 11)))])) == Outcome(target, 3, 7, 10)
    assert stored(address, name) == [8, 9, 10]


def test_an_unreadable_floor_is_a_refusal(address: Address, name: str) -> None:
    make_stream(address, f"KV_{name}", [f"$KV.{name}.>"])
    publish_many(address, outgoing([(f"$KV.{name}.ox", b"{}", None, None)]))
    make_stream(address, name, allow_atomic=True)
    for floor_stream, words in ((f"KV_{name}", "names no position"), ("KV_nowhere", "stream not found")):
        target = Target(subject=f"{name}.main", stream=name, floor_subject=f"$KV.{name}.ox", floor_stream=floor_stream)
        refused = one(append_once(address, [(target, table([5]))])).refused
        assert refused is not None
        assert words in refused.reason
        assert (refused.position, refused.kind) == (5, RefusalKind.OTHER)


def test_many_targets_are_written_at_once(address: Address, name: str) -> None:
    make_stream(address, name, allow_atomic=True)
    targets = [Target(subject=f"{name}.t{number}", stream=name) for number in range(120)]
    work = [(target, table(range(1, 11 + number % 3), ids=False)) for number, target in enumerate(targets)]
    outcomes = append_once(address, work)
    assert [outcome.target for outcome in outcomes] == targets
    assert all(
        outcome.stored == rows.num_rows and outcome.refused is None
        for outcome, (_, rows) in zip(outcomes, work, strict=True)
    )
    found = rows(address, name)
    for target in targets[:5]:
        mine = [int(row["data"]) for row in found if row["subject"] == target.subject]
        assert mine == list(range(1, len(mine) + 1))
    assert sum(outcome.skipped for outcome in append_once(address, work)) == len(found)


def test_an_empty_call_does_nothing(address: Address, name: str) -> None:
    assert append_once(address, []) == []
    target = Target(subject=f"{name}.main", stream="nowhere")
    assert append_once(address, [(target, table([]))]) == [Outcome(target, 0, 0, 0)]


def test_record_batches_with_headers_and_a_custom_position_header(address: Address, name: str) -> None:
    make_stream(address, name, allow_atomic=True)
    target = Target(subject=f"{name}.main", stream=name, position_header="Place")
    maps = [
        {"Trace": ["a", "b"], "Nats-Batch-Id": ["old"], "Nats-Expected-Last-Subject-Sequence": ["99"], "Place": ["7"]},
        {POSITION: ["40"]},
        {},
    ]
    batch = pa.record_batch(
        {
            "position": pa.array([1, 2, 3], pa.int64()),
            "data": pa.array([b"x", b"y", b""], pa.binary()),
            "headers": pa.array([list(each.items()) for each in maps], HEADERS),
            "msg_id": pa.array(["one", None, None], pa.string()),
        }
    )
    assert one(append_once(address, [(target, batch)])).stored == 3
    found = [
        {key: value for key, value in row["headers"] if not key.startswith("Nats-")} for row in rows(address, name)
    ]
    assert found == [{"Trace": ["a", "b"], "Place": ["1"]}, {POSITION: ["40"], "Place": ["2"]}, {"Place": ["3"]}]
    assert [dict(row["headers"]).get("Nats-Msg-Id") for row in rows(address, name)] == [["one"], None, None]
    assert newest_position(address, name, f"{name}.main", "Place") == 3
    assert one(append_once(address, [(target, batch)])).skipped == 3


def test_rows_out_of_order_are_refused(address: Address, name: str) -> None:
    target = make(address, name)
    good = Target(subject=f"{name}.good", stream=name)
    for positions in ([1, 3, 2], [1, 1], [0, 1], [-1]):
        with pytest.raises(InvalidInput):
            append_once(address, [(good, table([1])), (target, table(positions))])
    with pytest.raises(InvalidInput, match="no column 'position'"):
        append_once(address, [(target, table([1]).drop_columns(["position"]))])
    with pytest.raises(InvalidInput, match="same subject"):
        append_once(address, [(target, table([1])), (target, table([2]))])
    with pytest.raises(InvalidConfig, match="both its subject and its stream"):
        Target(subject=f"{name}.main", stream=name, floor_subject="a")
    assert state(address, name)["messages"] == 0


def test_a_target_that_refuses_does_not_stop_the_others(address: Address, name: str, way: str) -> None:
    good = make(address, name)
    full = make(address, f"{name}-full", max_msgs=1500, discard="new")
    plain = Target(subject=f"{name}-plain.main", stream=f"{name}-plain")
    make_stream(address, plain.stream)
    missing = Target(subject=f"{name}-missing.main", stream=f"{name}-missing")
    elsewhere = Target(subject=f"{name}.other", stream=f"{name}-else")
    make_stream(address, elsewhere.stream)
    few = Target(subject=f"{name}-plain.few", stream=plain.stream)
    work = [(target, table(range(1, 4001))) for target in (missing, full, plain, elsewhere, good)]
    by_target = {outcome.target: outcome for outcome in append_once(address, [*work, (few, table([7001, 7002, 7003]))])}
    refusals = {target: outcome.refused for target, outcome in by_target.items() if outcome.refused}
    assert {target: refusal.kind for target, refusal in refusals.items()} == {
        missing: RefusalKind.MISSING_STREAM,
        full: RefusalKind.FULL,
        plain: RefusalKind.OTHER,
        elsewhere: RefusalKind.OTHER,
    }
    assert by_target[good] == Outcome(good, 4000, 0, 4000)
    assert by_target[few] == Outcome(few, 3, 0, 7003), "a few rows need no atomic batch"
    assert refusals[missing] == Refusal(
        1, f"{missing.stream} {missing.subject}: stream not found", 10059, RefusalKind.MISSING_STREAM
    )
    room = 1500 if way == CHAINED else 1000
    assert (by_target[full].stored, refusals[full].position) == (room, room + 1)
    assert stored(address, full.stream) == list(range(1, room + 1))
    assert "allow_atomic" in refusals[plain].reason
    assert stored(address, name) == list(range(1, 4001))
    request_api(address, f"STREAM.PURGE.{full.stream}", {"keep": 1})
    assert one(append_once(address, [(full, table(range(1, 2001)))])) == Outcome(full, 2000 - room, room, 2000)


def test_a_subject_that_no_stream_takes_is_refused(
    address: Address, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("purveyor.jetstream.bulk.append.writer._MAX_CONFLICTS", 4)
    make_stream(address, name, [f"{name}.only"], allow_atomic=True)
    for positions in ([1], range(1, 11)):
        target = Target(subject=f"{name}.main", stream=name)
        refused = one(append_once(address, [(target, table(positions))])).refused
        assert refused == Refusal(1, f"{name} {name}.main: no responders", 503, RefusalKind.OTHER)


@pytest.mark.parametrize("place", [0, 1, 700, 1499, 1999])
def test_a_row_too_large_is_refused_at_its_position_and_can_be_passed(address: Address, name: str, place: int) -> None:
    """Too large for the server or for the stream: the rows before it are stored, those after it once it is skipped."""
    server_limit, stream_limit = make(address, name), make(address, f"{name}-small", max_msg_size=900)
    bodies = [b"%d" % n for n in range(1, 2001)]
    for target, size in ((server_limit, 17_000_000), (stream_limit, 1000)):
        large = [*bodies[:place], bodies[place] + bytes(size), *bodies[place + 1 :]]
        given = table(range(1, 2001)).set_column(1, "data", pa.array(large, pa.binary()))
        outcome = one(append_once(address, [(target, given)]))
        assert outcome.refused is not None
        assert (outcome.refused.position, outcome.refused.kind) == (place + 1, RefusalKind.TOO_LARGE)
        assert outcome.stored == place
        passed = Target(subject=target.subject, stream=target.stream, floor=place + 1)
        assert one(append_once(address, [(passed, given)])).refused is None
        assert stored(address, target.stream) == [n for n in range(1, 2001) if n != place + 1]


def test_a_row_that_cannot_be_sent_is_refused_at_its_position(address: Address, name: str) -> None:
    target = make(address, name)
    maps: list[list[tuple[str, list[str]]]] = [[] for _ in range(30)]
    maps[20] = [("Trace", ["two\nlines"])]
    given = table(range(1, 31)).append_column("headers", pa.array(maps, HEADERS))
    outcome = one(append_once(address, [(target, given)]))
    assert outcome.refused is not None
    assert "line break" in outcome.refused.reason
    assert (outcome.stored, outcome.refused.position, outcome.refused.kind) == (20, 21, RefusalKind.OTHER)


def test_known_message_ids_are_skipped_and_the_rest_is_stored(address: Address, name: str) -> None:
    """The messages are deleted but the stream remembers their ids; there is no floor."""
    target = make(address, name)
    append_once(address, [(target, table([3, 4, 900]))])
    request_api(address, f"STREAM.PURGE.{name}", {})
    assert one(append_once(address, [(target, table(range(1, 1501)))])) == Outcome(target, 1497, 3, 1500)
    assert stored(address, name) == [n for n in range(1, 1501) if n not in (3, 4, 900)]


def test_messages_of_another_writer_do_not_hide_the_last_position(address: Address, name: str) -> None:
    target = make(address, name)
    assert newest_position(address, name, target.subject) is None
    publish_many(address, outgoing((target.subject, b"0", None, None) for _ in range(3)))
    assert newest_position(address, name, target.subject) is None
    assert one(append_once(address, [(target, table(range(1, 11), ids=False))])).stored == 10
    publish_many(address, outgoing((target.subject, b"0", {POSITION: "not a number"}, None) for _ in range(1200)))
    assert newest_position(address, name, target.subject) == 10
    assert one(append_once(address, [(target, table(range(1, 21), ids=False))])) == Outcome(target, 10, 10, 20)
    with pytest.raises(UnknownStream):
        newest_position(address, "nowhere", target.subject)


def test_a_message_in_between_makes_the_writer_read_again(
    address: Address, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_batch_rows(monkeypatch, 999)
    target = make(address, name)

    def disturb(done: int) -> None:
        if done == 1000:
            publish_many(address, outgoing([(target.subject, b"0", None, None)]))
        elif done == 2000:
            sequence = state(address, name)["last_seq"]
            request_api(address, f"STREAM.MSG.DELETE.{name}", {"seq": sequence, "no_erase": True})

    outcome = one(append_once(address, [(target, table(range(1, 3001)))], AppendOptions(on_progress=disturb)))
    assert (outcome.stored, outcome.refused) == (3000, None)
    found = [int(row["data"]) for row in rows(address, name)]
    assert found[:1001] == [*range(1, 1001), 0]
    assert found[1001:] in ([*range(1001, 2000), *range(2001, 3001)], list(range(1001, 3001)))


def test_rows_that_a_server_lost_are_written_again_if_there_is_a_floor(address: Address, name: str) -> None:
    make_stream(address, f"KV_{name}", [f"$KV.{name}.>"])
    make_stream(address, name, allow_atomic=True, duplicate_window=100_000_000)
    target = Target(subject=f"{name}.main", stream=name, floor_subject=f"$KV.{name}.ox", floor_stream=f"KV_{name}")

    def forget(done: int) -> None:
        if done == 2000:
            for sequence in range(1901, 2001):
                request_api(address, f"STREAM.MSG.DELETE.{name}", {"seq": sequence, "no_erase": True})

    given = table(range(1, 3001), ids=False)
    assert one(append_once(address, [(target, given)], AppendOptions(on_progress=forget))) == Outcome(
        target, 3000, 0, 3000
    )
    assert stored(address, name) == list(range(1, 3001))


def test_a_writer_that_always_meets_conflicts_ends_in_a_refusal(
    address: Address, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without progress the writer stops reading again."""
    monkeypatch.setattr("purveyor.jetstream.bulk.append.writer._MAX_CONFLICTS", 3)
    target = make(address, name)
    publish_many(address, outgoing([(target.subject, b"0", None, None)]))

    def interfere(*_: Any) -> None:
        publish_many(address, outgoing([(target.subject, b"0", None, None)]))

    monkeypatch.setattr("purveyor.jetstream.bulk.append.writer.find_last_position", interfere)
    refused = one(append_once(address, [(target, table([1, 2]))])).refused
    assert refused is not None
    assert (refused.code, refused.kind) == (10071, RefusalKind.OTHER)


def test_an_old_read_is_repeated_before_a_write(address: Address, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer is suspended between read and write: others write the rows meanwhile, and readers delete them."""
    make_stream(address, f"KV_{name}", [f"$KV.{name}.>"])
    make_stream(address, name, allow_atomic=True)
    target = Target(subject=f"{name}.main", stream=name, floor_subject=f"$KV.{name}.ox", floor_stream=f"KV_{name}")
    monkeypatch.setattr("purveyor.jetstream.bulk.append.writer._STATE_MAX_AGE_SECONDS", 1.0)
    held_up: list[int] = []

    def suspend(done: int) -> None:
        if not held_up:
            held_up.append(done)
            append_once(address, [(target, table(range(1, 21), ids=False))])  # the rival
            publish_many(address, outgoing([(f"$KV.{name}.ox", b'{"position": 20}', None, None)]))
            for sequence in range(11, 21):
                request_api(address, f"STREAM.MSG.DELETE.{name}", {"seq": sequence, "no_erase": True})
            time.sleep(1.1)  # longer than that

    options = AppendOptions(batch_rows=10, on_progress=suspend)
    outcome = one(append_once(address, [(target, table(range(1, 31), ids=False))], options))
    assert (outcome.stored, outcome.skipped, outcome.last_position) == (20, 10, 30)
    assert stored(address, name) == [*range(1, 11), *range(21, 31)]


def test_a_target_that_is_denied_does_not_stop_the_others(tmp_path: Path) -> None:
    rights = 'publish: {deny: ["S.denied.>", "$JS.API.STREAM.MSG.GET.T"]}'
    config = (
        f"authorization {{ users: [{{user: u, password: p, permissions: {{{rights}}}}}, {{user: a, password: a}}] }}\n"
    )
    with serving(tmp_path, config) as server:
        admin = Address(server.address.urls, user="a", password="a")
        for stream in ("S", "T"):
            make_stream(admin, stream, allow_atomic=True)
        address = Address(server.address.urls, user="u", password="p")
        denied = [Target(subject=f"S.denied.{number}", stream="S") for number in range(5)]
        good, unseen = Target(subject="S.good", stream="S"), Target(subject="T.a", stream="T")
        for _ in range(2):  # the connection with the denials is not used again
            outcomes = append_once(
                address, [(target, table(range(1, 501), ids=False)) for target in (*denied, good, unseen)]
            )
            for outcome in outcomes:
                if outcome.target is good:
                    assert outcome.refused is None
                    assert outcome.last_position == 500
                else:
                    assert outcome.refused is not None
                    assert outcome.refused.kind is RefusalKind.DENIED
        assert state(admin, "S")["messages"] == 500


def test_a_missing_server_is_an_error_after_the_timeout(server: Server, name: str) -> None:
    nowhere = Address(("nats://127.0.0.1:1",))
    with pytest.raises(ServerUnavailable, match=r"gave up after 0\.2 s"):
        append_once(nowhere, [(Target(subject="a", stream="S"), table([1]))], AppendOptions(patience_seconds=0.2))


@pytest.mark.parametrize(
    ("answer", "rows", "verdict", "kind"),
    [
        (ErrorReply(400, 10071, "wrong last sequence: 6"), 5, RefusalAction.READ_AGAIN, RefusalKind.OTHER),
        (ErrorReply(503, 0, "no responders"), 5, RefusalAction.READ_AGAIN, RefusalKind.OTHER),
        (ErrorReply(503, 0, "no responders"), 0, RefusalAction.WAIT, RefusalKind.OTHER),
        (ErrorReply(503, 10008, "JetStream system temporarily unavailable"), 0, RefusalAction.WAIT, RefusalKind.OTHER),
        (ErrorReply(429, 10210, "atomic publish too many inflight"), 5, RefusalAction.WAIT, RefusalKind.OTHER),
        (ErrorReply(503, 10077, "stream closed"), 5, RefusalAction.WAIT, RefusalKind.OTHER),
        (ErrorReply(503, 10077, "maximum bytes exceeded"), 5, RefusalAction.GIVE_UP, RefusalKind.FULL),
        (
            ErrorReply(500, 10047, "insufficient storage resources available"),
            5,
            RefusalAction.GIVE_UP,
            RefusalKind.FULL,
        ),
        (ErrorReply(404, 10059, "stream not found"), 0, RefusalAction.GIVE_UP, RefusalKind.MISSING_STREAM),
        (ErrorReply(400, 10201, "duplicate message id"), 5, RefusalAction.SEND_FEWER, RefusalKind.OTHER),
        (ErrorReply(400, 10176, "incomplete"), 2, RefusalAction.SEND_FEWER, RefusalKind.OTHER),
        (
            ErrorReply(400, 10054, "message size exceeds maximum allowed"),
            1,
            RefusalAction.GIVE_UP,
            RefusalKind.TOO_LARGE,
        ),
        (ErrorReply(400, 10109, "sealed"), 5, RefusalAction.GIVE_UP, RefusalKind.OTHER),
        (ErrorReply(0, 0, "something else"), 1, RefusalAction.GIVE_UP, RefusalKind.OTHER),
    ],
)
def test_each_refusal_has_its_action(answer: ErrorReply, rows: int, verdict: RefusalAction, kind: RefusalKind) -> None:
    assert decide_action(answer, rows) == (verdict, kind)
