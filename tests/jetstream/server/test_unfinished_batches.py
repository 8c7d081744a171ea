"""An atomic batch that a killed server had begun to store is whole when its publisher was answered."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from purveyor.jetstream import PublishMode, PublishOptions, ServerOptions, outgoing, publish_many
from purveyor.jetstream.bulk.net.pool import request_api
from purveyor.jetstream.server import EmbeddedServer, RestartPolicy
from purveyor.jetstream.server.process import drop_unfinished_batches
from tests.support.nats_servers import OwnServer
from tests.support.scale import chance, pick
from tests.support.waiting import wait_until

COUNT = 1000
OFTEN = ServerOptions(sync="always", restart=RestartPolicy(max_deaths=1000, max_pause_seconds=0.2))


@pytest.mark.chaos
@pytest.mark.parametrize("retention", ["interest", "limits", "workqueue"])
def test_a_batch_whose_commit_was_cut_off_is_stored_whole(own_server: OwnServer, retention: str) -> None:
    """Killed as soon as the first of its messages is in the store, or a moment later."""
    random = chance("kill while a batch is committed")
    server = own_server(OFTEN)
    for number in range(pick(3, 30)):
        stream = f"S{number}"
        config = {"name": stream, "subjects": [stream], "retention": retention, "allow_atomic": True}
        request_api(server.address, f"STREAM.CREATE.{stream}", config)
        durable = {"durable_name": "d", "ack_policy": "explicit"}
        request_api(server.address, f"CONSUMER.DURABLE.CREATE.{stream}.d", {"stream_name": stream, "config": durable})
        killing = threading.Thread(target=kill_in_commit, args=(server, stream, random.uniform(0, 0.005)))
        killing.start()
        rows = ((stream, bytes(2000), None, f"{stream}-{index}") for index in range(COUNT))
        report = publish_many(server.address, outgoing(rows), PublishOptions(mode=PublishMode.ATOMIC))
        killing.join()
        assert report.stored + report.duplicates == COUNT
        state = request_api(server.address, f"STREAM.INFO.{stream}")["state"]
        assert (state["messages"], state.get("num_deleted", 0)) == (COUNT, 0), report


def kill_in_commit(server: EmbeddedServer, stream: str, later: float) -> None:
    pid = wait_until(lambda: server.pid)
    block = server.directory / "jetstream" / "$G" / "streams" / stream / "msgs" / "1.blk"
    while not (block.exists() and block.stat().st_size):  # a commit takes milliseconds: no pause
        pass
    time.sleep(later)
    os.kill(pid, signal.SIGKILL)


def test_only_batches_of_interest_streams_are_dropped(tmp_path: Path) -> None:
    configs = {"interest": '{"retention": "interest"}', "limits": '{"retention": "limits"}', "half": "{", "odd": "[]"}
    for name, config in configs.items():
        staged = tmp_path / "$G" / "streams" / name / "batches" / "Ab12"
        staged.mkdir(parents=True)
        (staged / "meta.inf").touch()
        (tmp_path / "$G" / "streams" / name / "meta.inf").write_text(config)
    drop_unfinished_batches(tmp_path)
    assert sorted(path.parts[-3] for path in tmp_path.glob("*/streams/*/batches/*")) == ["half", "limits", "odd"]
    drop_unfinished_batches(tmp_path / "not-there")
