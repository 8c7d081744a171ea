"""Broken connections: nothing is lost or stored twice, order is kept, and the caller only waits."""

import threading
from pathlib import Path

import pytest

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import (
    PublishMode,
    PublishOptions,
    ReadOptions,
    Route,
    outgoing,
    publish_many,
    read_range,
)
from purveyor.jetstream.bulk.net.pool import close_idle
from purveyor.model.errors import OutcomeUnknown, ServerUnavailable
from tests.support.bulk_messages import numbered, restore_after_failures, rows
from tests.support.bulk_servers import Proxy, Server, connected, make_stream, serving, state
from tests.support.waiting import wait_until

MODES = pytest.mark.parametrize("mode", list(PublishMode))
COUNT = 12_000


@pytest.fixture(autouse=True)
def _no_idle_connections() -> None:
    close_idle()


@MODES
@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("part", [0.02, 0.5, 0.97])
def test_a_cut_while_publishing(server: Server, name: str, mode: PublishMode, way: str, part: float) -> None:
    """Upstream, a frame is cut; downstream, acknowledgements of stored messages are lost."""
    make_stream(server.address, name, allow_atomic=True)
    with Proxy(server.port) as proxy:
        # About what a message takes on the wire, and its answer (in batches: an answer for each thousand).
        if way == "up":
            proxy.cut_after_up = int(COUNT * 75 * part)
        else:
            proxy.cut_after_down = (
                900 + int(COUNT * 50 * part) if mode is PublishMode.PIPELINED else 900 + int(1500 * part)
            )
        report = publish_many(
            proxy.address, outgoing(numbered(f"{name}.a", COUNT, "i"), rows=1500), PublishOptions(mode=mode)
        )
        assert proxy.cuts == 1
    assert report.stored + report.duplicates == COUNT
    assert [row["data"] for row in rows(server.address, name)] == [b"%d" % n for n in range(COUNT)]


@MODES
def test_an_outage_while_publishing_is_waited_for(server: Server, name: str, mode: PublishMode) -> None:
    make_stream(server.address, name, allow_atomic=True)
    with Proxy(server.port, stay_down=True) as proxy:
        proxy.cut_after_up = COUNT * 50
        refused = threading.Thread(target=restore_after_failures, args=(proxy,))
        refused.start()
        report = publish_many(proxy.address, outgoing(numbered(f"{name}.a", COUNT)), PublishOptions(mode=mode))
        refused.join()
    assert report.stored + report.duplicates == COUNT
    assert [row["data"] for row in rows(server.address, name)] == [b"%d" % n for n in range(COUNT)]


@MODES
def test_an_outage_beyond_the_timeout_reports_what_is_stored(server: Server, name: str, mode: PublishMode) -> None:
    make_stream(server.address, name, allow_atomic=True)
    acknowledged: list[int] = []
    options = PublishOptions(mode=mode, window=500, patience_seconds=2, on_progress=acknowledged.append)
    with Proxy(server.port, stay_down=True) as proxy:
        proxy.cut_after_up = COUNT * 60
        with pytest.raises(ServerUnavailable) as error:
            publish_many(proxy.address, outgoing(numbered(f"{name}.a", COUNT)), options)
    assert f"{acknowledged[-1]} messages are stored" in str(error.value)
    assert state(server.address, name)["messages"] >= acknowledged[-1]


@MODES
def test_an_outage_longer_than_duplicates_are_recognised_is_an_unknown_outcome(
    server: Server, name: str, mode: PublishMode
) -> None:
    make_stream(server.address, name, allow_atomic=True, duplicate_window=200_000_000)
    with Proxy(server.port, stay_down=True) as proxy:
        proxy.cut_after_down = 2000 if mode is PublishMode.PIPELINED else 950

        def back() -> None:
            """Open the proxy again after the server has forgotten the ids."""
            wait_until(lambda: proxy.cuts and proxy.refused >= 5)
            proxy.down = False

        thread = threading.Thread(target=back)
        thread.start()
        with pytest.raises(OutcomeUnknown, match=r"message \d+ was sent .*recognises duplicates for 0\.2 s"):
            publish_many(proxy.address, outgoing(numbered(f"{name}.a", COUNT)), PublishOptions(mode=mode))
        thread.join()
    stored = [row["data"] for row in rows(server.address, name)]
    assert stored == [b"%d" % n for n in range(len(stored))]


@MODES
def test_a_server_killed_while_publishing(tmp_path: Path, mode: PublishMode) -> None:
    with serving(tmp_path) as server:
        make_stream(server.address, "S", allow_atomic=True)
        killed = threading.Event()

        def kill(done: int) -> None:
            if done > COUNT // 3 and not killed.is_set():
                killed.set()
                server.stop(kill=True)
                server.start()

        options = PublishOptions(mode=mode, on_progress=kill)
        report = publish_many(server.address, outgoing(numbered("S.a", COUNT, "i")), options)
        assert killed.is_set()
        assert report.stored + report.duplicates == COUNT
        assert [row["data"] for row in rows(server.address, "S")] == [b"%d" % n for n in range(COUNT)]


@pytest.mark.parametrize("route", [Route.DIRECT, Route.CONSUMER])
@pytest.mark.parametrize("part", [0.001, 0.4, 0.9])
def test_a_cut_while_reading(server: Server, name: str, route: Route, part: float) -> None:
    make_stream(server.address, name)
    publish_many(server.address, outgoing((f"{name}.a", b"%d" % n + bytes(500), None, None) for n in range(COUNT)))
    with Proxy(server.port) as proxy:
        proxy.cut_after_down = 4000 + int(COUNT * 500 * part)
        options = ReadOptions(route=route, batch_rows=400)
        found = [row for batch in read_range(proxy.address, name, 1, COUNT, options) for row in batch.to_pylist()]
        assert proxy.cuts == 1
    assert [row["sequence"] for row in found] == list(range(1, COUNT + 1))
    assert [row["data"].rstrip(b"\0") for row in found] == [b"%d" % n for n in range(COUNT)]


@pytest.mark.parametrize("route", [Route.DIRECT, Route.CONSUMER])
def test_an_outage_while_reading(server: Server, name: str, route: Route) -> None:
    make_stream(server.address, name)
    publish_many(server.address, outgoing((f"{name}.a", bytes(500), None, None) for n in range(COUNT)))
    with Proxy(server.port, stay_down=True) as proxy:
        proxy.cut_after_down = COUNT * 200
        thread = threading.Thread(target=restore_after_failures, args=(proxy,))
        thread.start()
        options = ReadOptions(route=route, batch_rows=400)
        found = [n for batch in read_range(proxy.address, name, 1, COUNT, options) for n in batch.column(0).to_pylist()]
        thread.join()
    assert found == list(range(1, COUNT + 1))
    with Proxy(server.port, stay_down=True) as proxy:
        proxy.cut_after_down = COUNT * 200
        with pytest.raises(ServerUnavailable, match=r"gave up after 2 s"):
            list(read_range(proxy.address, name, 1, COUNT, ReadOptions(route=route, patience_seconds=2)))


def test_the_next_server_of_the_list_is_taken(server: Server, name: str) -> None:
    make_stream(server.address, name)
    with Proxy(server.port, stay_down=True) as proxy:
        both = Address((*proxy.address.urls, *server.address.urls))
        proxy.cut_after_up = COUNT * 50
        report = publish_many(both, outgoing(numbered(f"{name}.a", COUNT)), PublishOptions())
        assert proxy.cuts == 1
    assert report.stored + report.duplicates == COUNT
    assert [row["data"] for row in rows(server.address, name)] == [b"%d" % n for n in range(COUNT)]


def test_a_server_that_pings_often_is_answered(tmp_path: Path) -> None:
    """PONGs go between frames, also during large writes; an idle connection replies at its next use."""
    with serving(tmp_path, 'ping_interval: "100ms"\nping_max: 30\n') as server:
        make_stream(server.address, "S")
        body = bytes(300_000)
        publish_many(server.address, outgoing(("S.a", body, None, None) for _ in range(400)))
        assert sum(batch.num_rows for batch in read_range(server.address, "S", 1, 400)) == 400
        assert state(server.address, "S")["messages"] == 400


def test_a_paused_reader_continues(tmp_path: Path) -> None:
    """The server closes the connection of a reader that does not read; the reader continues after its last row."""
    with serving(tmp_path, 'write_deadline: "200ms"\nmax_pending: 8MB\n') as server:
        make_stream(server.address, "S")
        publish_many(server.address, outgoing(("S.a", bytes(5000), None, None) for _ in range(20_000)))
        reading = read_range(server.address, "S", 1, 20_000, ReadOptions(route=Route.CONSUMER, batch_rows=100))
        seen = next(reading).column("sequence").to_pylist()
        wait_until(lambda: "Slow Consumer" in (tmp_path / "log").read_text())
        for batch in reading:
            seen += batch.column("sequence").to_pylist()
        assert seen == list(range(1, 20_001))


def test_a_subscriber_that_never_replies_is_given_up(
    server: Server, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A live connection (the server answers PINGs) does not count as progress without acknowledgements."""
    monkeypatch.setattr("purveyor.jetstream.bulk.publish.pipelined.SILENCE_SECONDS", 0.3)
    monkeypatch.setattr("purveyor.jetstream.bulk.publish.pipelined._PUMP_SECONDS", 0.05)
    monkeypatch.setattr("purveyor.jetstream.bulk.net.connection._PING_AFTER_SECONDS", 0.1)
    with connected(server.address) as listener:
        listener.subscribe(name)
        listener.request("$JS.API.INFO")
        with pytest.raises(ServerUnavailable, match=r"no message was acknowledged.*; 0 messages are stored"):
            publish_many(server.address, outgoing(numbered(name, 1)), PublishOptions(patience_seconds=2))
