"""publish_many: every message is acknowledged in order; every refusal names index and reason."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import (
    Outgoing,
    PublishMode,
    PublishOptions,
    PublishReport,
    outgoing,
    publish_many,
    read_range,
)
from purveyor.model.errors import InvalidSubject, PermissionDenied, PublishRefused, ServerUnavailable, UnknownStream
from tests.support.bulk_messages import numbered, rows
from tests.support.bulk_servers import connected, make_stream, request_api, serving, state


def test_messages_are_stored_as_given(address: Address, name: str) -> None:
    make_stream(address, name)
    given: list[Outgoing] = [
        (f"{name}.a", b"plain", None, "one"),
        (f"{name}.ünï.日本", b"", {"Word": "grüße 日本"}, "two"),
        (f"{name}.b", b"\r\nMSG a 1 2\r\nhi\r\n", {"A": ["1", "2", ""], "B": "x"}, "three"),
    ]
    report = publish_many(address, outgoing(given))
    assert report == PublishReport(3, 0, {name: 3})
    found = rows(address, name)
    assert [(row["subject"], row["data"]) for row in found] == [(subject, data) for subject, data, _, _ in given]
    assert [row["headers"] for row in found] == [
        [("Nats-Msg-Id", ["one"])],
        [("Nats-Msg-Id", ["two"]), ("Word", ["grüße 日本"])],
        [("Nats-Msg-Id", ["three"]), ("A", ["1", "2", ""]), ("B", ["x"])],
    ]


def test_a_message_without_an_id_gets_one(address: Address, name: str) -> None:
    make_stream(address, name)
    for _ in range(2):
        assert publish_many(address, outgoing(numbered(f"{name}.a", 10))).stored == 10
    ids = [dict(row["headers"])["Nats-Msg-Id"][0] for row in rows(address, name)]
    assert len(set(ids)) == 20


def test_duplicates_are_counted_as_such(address: Address, name: str) -> None:
    make_stream(address, name)
    publish_many(address, outgoing(numbered(f"{name}.a", 100, "i")))
    report = publish_many(address, outgoing(numbered(f"{name}.a", 150, "i")))
    assert report == PublishReport(50, 100, {name: 150})


def test_order_is_kept_over_many_batches_and_streams(address: Address, name: str) -> None:
    streams = [f"{name}-{k}" for k in range(3)]
    for stream in streams:
        make_stream(address, stream)
    messages: list[Outgoing] = [(f"{streams[n * n % 3]}.x", b"%d" % n, None, None) for n in range(12_000)]
    progress: list[int] = []
    report = publish_many(address, outgoing(messages, rows=777), PublishOptions(on_progress=progress.append))
    assert report.stored == 12_000
    assert progress == sorted(progress)
    assert progress[-1] == 12_000
    for stream in streams:
        expected = [data for subject, data, _, _ in messages if subject == f"{stream}.x"]
        if expected:
            assert [row["data"] for row in rows(address, stream)] == expected
            assert report.last_sequences[stream] == len(expected)


def test_batches_of_single_rows_and_empty_batches(address: Address, name: str) -> None:
    make_stream(address, name)
    empty = next(iter(outgoing(numbered(name, 1)))).slice(0, 0)
    batches = [empty, *outgoing(numbered(f"{name}.a", 300), rows=1), empty]
    assert publish_many(address, batches).stored == 300
    assert publish_many(address, [empty]) == PublishReport(0, 0, {})
    assert publish_many(address, []) == PublishReport(0, 0, {})


@pytest.mark.parametrize("mode", list(PublishMode))
def test_messages_of_8_megabytes(address: Address, name: str, mode: PublishMode) -> None:
    make_stream(address, name, allow_atomic=True)
    bodies = [bytes([k]) * (8 << 20) for k in range(4)]
    given: list[Outgoing] = [(f"{name}.a", body, None, None) for body in bodies]
    assert publish_many(address, outgoing(given), PublishOptions(mode=mode)).stored == 4
    assert [row["data"] for row in rows(address, name)] == bodies


def test_a_window_of_one(address: Address, name: str) -> None:
    make_stream(address, name)
    assert publish_many(address, outgoing(numbered(f"{name}.a", 50)), PublishOptions(window=1)).stored == 50


def test_too_large_is_refused_before_sending(address: Address, name: str) -> None:
    make_stream(address, name)
    given = [*numbered(f"{name}.a", 3), (f"{name}.a", bytes(9_000_001), None, None)]
    with pytest.raises(PublishRefused, match=r"message 3 has .* takes 9000000") as refused:
        publish_many(address, outgoing(given, rows=2))
    assert (refused.value.index, refused.value.stored) == (3, 2)
    assert state(address, name)["messages"] == 2


def test_an_invalid_subject_is_refused_by_index(address: Address, name: str) -> None:
    make_stream(address, name)
    with pytest.raises(InvalidSubject, match=r"message 4: .*; 4 messages before it are stored"):
        publish_many(address, outgoing([*numbered(f"{name}.a", 4), ("a b", b"", None, None)], rows=2))
    assert state(address, name)["messages"] == 4


def test_a_full_stream_refuses_by_index(address: Address, name: str) -> None:
    make_stream(address, name, max_msgs=10, discard="new")
    with pytest.raises(PublishRefused, match="message 10 was refused: maximum messages exceeded") as refused:
        publish_many(address, outgoing(numbered(f"{name}.a", 5000)))
    error = refused.value
    assert (error.index, error.code, error.err_code, error.stored) == (10, 503, 10077, 10)
    assert error.fix


def test_a_message_too_large_for_its_stream_is_refused_and_what_is_under_way_is_counted(
    address: Address, name: str
) -> None:
    make_stream(address, name, max_msg_size=100)
    given = numbered(f"{name}.a", 3000)
    given[1500] = (f"{name}.a", bytes(200), None, None)
    with pytest.raises(PublishRefused, match="message 1500") as refused:
        publish_many(address, outgoing(given))
    assert refused.value.err_code == 10054
    assert refused.value.stored == state(address, name)["messages"]


def test_a_sealed_stream_refuses(address: Address, name: str) -> None:
    make_stream(address, name)
    config = request_api(address, f"STREAM.INFO.{name}")["config"]
    request_api(address, f"STREAM.UPDATE.{name}", {**config, "sealed": True})
    with pytest.raises(PublishRefused, match="sealed") as refused:
        publish_many(address, outgoing(numbered(f"{name}.a", 2)))
    assert (refused.value.err_code, refused.value.index, refused.value.stored) == (10109, 0, 0)


def test_another_stream_than_expected_refuses(address: Address, name: str) -> None:
    make_stream(address, name)
    options = PublishOptions(expected_stream="OTHER")
    with pytest.raises(PublishRefused) as refused:
        publish_many(address, outgoing(numbered(f"{name}.a", 2)), options)
    assert refused.value.err_code == 10060
    publish_many(address, outgoing(numbered(f"{name}.a", 2)), PublishOptions(expected_stream=name))


@pytest.mark.parametrize("mode", list(PublishMode))
def test_a_subject_that_no_stream_takes_is_an_unknown_stream(address: Address, name: str, mode: PublishMode) -> None:
    with pytest.raises(UnknownStream, match=f"message 0 on subject '{name}.a'"):
        publish_many(address, outgoing(numbered(f"{name}.a", 3)), PublishOptions(mode=mode))


def test_an_unknown_stream_in_the_middle_is_reported_with_what_is_stored(address: Address, name: str) -> None:
    make_stream(address, name)
    given = [*numbered(f"{name}.a", 5), *numbered("nowhere.to.be.found", 1), *numbered(f"{name}.a", 5)]
    with pytest.raises(UnknownStream, match=r"message 5 on subject 'nowhere.to.be.found'; 10 others are stored"):
        publish_many(address, outgoing(given))


def test_a_stream_that_is_deleted_meanwhile_is_an_unknown_stream(address: Address, name: str) -> None:
    make_stream(address, name)

    def batches() -> Iterator[pa.RecordBatch]:
        yield from outgoing(numbered(f"{name}.a", 10))
        request_api(address, f"STREAM.DELETE.{name}")
        yield from outgoing(numbered(f"{name}.a", 10))

    with pytest.raises(UnknownStream):
        publish_many(address, batches())


def test_a_reply_of_another_service_is_not_an_acknowledgement(address: Address, name: str) -> None:
    """A service that replies is not a stream."""
    with connected(address) as service:
        service.subscribe(name)
        service.flush()
        ready = service.request("$JS.API.INFO")
        assert ready.status == 0
        stop = threading.Event()

        def serve() -> None:
            while not stop.is_set():
                service.pump(0.05)
                frames = service.receive()
                for row in range(len(frames)):
                    words = frames.data[frames.starts[row] : frames.line_ends[row]].tobytes().split(b" ")
                    service.publish(words[3].decode(), b"thanks")

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with pytest.raises(PublishRefused, match="another service listens"):
                publish_many(address, outgoing(numbered(name, 1)))
        finally:
            stop.set()
            thread.join()


def test_a_failing_source_leaves_nothing_open(address: Address, name: str) -> None:
    make_stream(address, name)

    def batches() -> Iterator[pa.RecordBatch]:
        yield from outgoing(numbered(f"{name}.a", 10))
        raise RuntimeError("the source failed")

    with pytest.raises(RuntimeError, match="the source failed"):
        publish_many(address, batches())


def test_a_missing_server_is_waited_for_and_then_reported(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        pass
    with pytest.raises(ServerUnavailable, match=r"gave up after 0\.3 s"):
        publish_many(server.address, outgoing(numbered("a", 1)), PublishOptions(patience_seconds=0.3))


def test_a_subject_not_permitted_is_permission_denied(tmp_path: Path) -> None:
    config = """
    authorization { users: [
      { user: admin, password: a }
      { user: writer, password: w, permissions: { publish: ["ok.>"], subscribe: ["_INBOX.>"] } }
      { user: deaf, password: d, permissions: { publish: [">"], subscribe: ["nothing"] } }
    ] }
    """
    with serving(tmp_path, config) as server:
        make_stream(server.address.with_password("admin", "a"), "S", ["ok.>", "denied.>"])
        writer = server.address.with_password("writer", "w")
        assert publish_many(writer, outgoing(numbered("ok.a", 100))).stored == 100
        with pytest.raises(PermissionDenied, match=r"denied\.x"):
            publish_many(writer, outgoing([*numbered("ok.a", 5), *numbered("denied.x", 1)]))
        with pytest.raises(PermissionDenied, match="_INBOX"):
            publish_many(server.address.with_password("deaf", "d"), outgoing(numbered("ok.a", 1)))
        with pytest.raises(PermissionDenied, match=r"STREAM\.INFO"):
            list(read_range(writer, "S", 1, 10))
