"""`append_once` with broken connections, dead servers and other writers: each row once, in order."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from purveyor.jetstream.bulk import AppendOptions, Outcome, RefusalKind, Target, append_once
from purveyor.jetstream.bulk.net.pool import close_idle
from purveyor.model.errors import ServerUnavailable
from tests.support.append import BATCHED, CHAINED, choose_write_mode, limit_batch_rows, make, one, stored, table
from tests.support.bulk_messages import restore_after_failures
from tests.support.bulk_servers import Proxy, Server, connected, make_stream, serving, state
from tests.support.waiting import wait_until

COUNT = 6000


@pytest.fixture(autouse=True)
def _no_idle_connections() -> None:
    close_idle()


@pytest.fixture(params=[CHAINED, BATCHED], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    chosen: str = request.param
    choose_write_mode(chosen, monkeypatch)
    return chosen


@pytest.mark.parametrize(
    ("direction", "part"),
    [("up", 0.001), ("up", 0.02), ("up", 0.5), ("up", 0.99), ("down", 0.1), ("down", 0.5), ("down", 0.9)],
)
def test_a_cut_while_appending(server: Server, name: str, way: str, direction: str, part: float) -> None:
    """Upstream, a frame is cut; downstream, the reply to a stored row is lost. The stream soon forgets ids."""
    target = make(server.address, name, duplicate_window=100_000_000)
    with Proxy(server.port) as proxy:
        up, down = (COUNT * 105, COUNT // 4) if way == CHAINED else (COUNT * 165, 700)
        if direction == "up":
            proxy.cut_after_up = 400 + int(up * part)
        else:
            proxy.cut_after_down = 600 + int(down * part)
        outcome = one(append_once(proxy.address, [(target, table(range(1, COUNT + 1), ids=way == CHAINED))]))
        assert proxy.cuts == 1
    assert outcome.stored + outcome.skipped == COUNT
    assert outcome.refused is None
    assert stored(server.address, name) == list(range(1, COUNT + 1))


def test_an_outage_is_waited_for_and_no_target_is_forgotten(server: Server, name: str) -> None:
    targets = [make(server.address, f"{name}-{number}") for number in range(10)]
    work = [(target, table(range(1, 1501))) for target in targets]
    with Proxy(server.port, stay_down=True) as proxy:
        proxy.cut_after_up = 1_000_000
        thread = threading.Thread(target=restore_after_failures, args=(proxy,))
        thread.start()
        outcomes = append_once(proxy.address, work)
        thread.join()
    assert [(outcome.target, outcome.last_position) for outcome in outcomes] == [(target, 1500) for target in targets]
    for target in targets:
        assert stored(server.address, target.stream) == list(range(1, 1501))


def test_an_outage_beyond_the_timeout_is_an_error_and_the_next_call_continues(server: Server, name: str) -> None:
    target = make(server.address, name)
    given = table(range(1, COUNT + 1))
    with Proxy(server.port, stay_down=True) as proxy:
        proxy.cut_after_up = 500_000
        with pytest.raises(ServerUnavailable, match=r"gave up after 2 s.*messages are stored"):
            append_once(proxy.address, [(target, given)], AppendOptions(patience_seconds=2))
    outcome = one(append_once(server.address, [(target, given)]))
    assert outcome.stored + outcome.skipped == COUNT
    assert outcome.stored < COUNT
    assert stored(server.address, name) == list(range(1, COUNT + 1))


def test_two_writers_and_a_server_that_is_killed_store_each_row_once(tmp_path: Path, way: str) -> None:
    """Two threads write the same rows in different batches while the server dies twice."""
    with serving(tmp_path, "max_payload: 9000000\n") as server:
        targets = [make(server.address, f"S{number}", duplicate_window=100_000_000) for number in range(3)]
        given = table(range(1, COUNT + 1), ids=way == CHAINED)
        lock = threading.Lock()
        kills = [COUNT, COUNT // 2]

        def die(done: int) -> None:
            with lock:
                if kills and done > kills[-1]:
                    kills.pop()
                    server.stop(kill=True)
                    server.start()

        def write(seed: int) -> list[Outcome]:
            sizes = random.Random(seed)
            options = AppendOptions(batch_rows=sizes.randint(200, 1000), on_progress=die)
            return append_once(server.address, [(target, given) for target in targets], options)

        with ThreadPoolExecutor(2) as threads:
            results = list(threads.map(write, (1, 2)))
        assert not kills
        for mine, theirs in zip(*results, strict=True):
            assert (mine.refused, theirs.refused) == (None, None)
            assert (mine.last_position, theirs.last_position) == (COUNT, COUNT)
        for target in targets:
            assert stored(server.address, target.stream) == list(range(1, COUNT + 1))


def test_a_stream_deleted_during_an_append_is_reported(
    server: Server, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_batch_rows(monkeypatch, 999)
    target = make(server.address, name)

    def delete(done: int) -> None:
        if done == 1000:
            with connected(server.address) as connection:
                connection.request_api(f"STREAM.DELETE.{name}")

    refused = one(
        append_once(server.address, [(target, table(range(1, 3001)))], AppendOptions(on_progress=delete))
    ).refused
    assert refused is not None
    assert (refused.position, refused.kind) == (1001, RefusalKind.MISSING_STREAM)


def test_a_subscriber_that_never_replies_is_given_up(
    server: Server, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A live connection does not count as progress, and one silent target does not stop the others."""
    monkeypatch.setattr("purveyor.jetstream.bulk.append.writer.SILENCE_SECONDS", 1.0)
    monkeypatch.setattr("purveyor.jetstream.bulk.append.writer._PUMP_SECONDS", 0.05)
    good = make(server.address, name)
    make_stream(server.address, f"{name}-deaf", ["elsewhere." + name], allow_atomic=True)
    silent = Target(subject=f"{name}-deaf", stream=f"{name}-deaf")
    with connected(server.address) as listener:
        listener.subscribe(silent.subject)
        listener.request("$JS.API.INFO")
        for given in (table([4, 5]), table(range(4, 104))):
            outcomes = append_once(server.address, [(silent, given), (good, given)], AppendOptions(patience_seconds=5))
            assert outcomes[1].last_position == given.num_rows + 3
    refused = outcomes[0].refused
    assert refused is not None
    assert (refused.position, refused.kind) == (4, RefusalKind.OTHER)
    assert "no reply" in refused.reason


def test_a_starting_server_is_waited_for(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        target = make(server.address, "S")
        server.stop()
        later = threading.Thread(target=server.start)
        later.start()
        assert one(append_once(server.address, [(target, table(range(1, 2001)))])).stored == 2000
        later.join()
        wait_until(lambda: state(server.address, "S")["messages"] == 2000)
