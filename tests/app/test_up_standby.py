"""`purveyor up --standby`: the standby of a killed pipeline delivers the next event, and gets a standby of its own."""

import json
import os
import signal
from pathlib import Path

from tests.support.command_line import invoke
from tests.support.up_program import Up
from tests.support.waiting import wait_until

EVENT = {"publisher_name": "t", "ts": "2026-01-01T00:00:00Z", "realm": "udm", "topic": "users/user"}


def test_the_standby_takes_over_and_the_killed_process_becomes_the_next_standby(tmp_path: Path) -> None:
    data = tmp_path / "data"
    on_data = ("--data-dir", str(data))
    up = Up(data, "--master", "local[2]", "--standby")
    try:
        up.wait_for("up", "everything")
        up.wait_for("standby", "standby")
        assert invoke(*on_data, "subscription", "add", "people", "--topic", "udm:users/user").code == 0
        findings = json.loads(invoke(*on_data, "doctor", "--json").out)["findings"]
        of_pipeline = [each for each in findings if each["about"] == "pipeline"]
        assert [each for each in of_pipeline if each["text"].endswith("stands by")]
        assert {each["weight"] for each in of_pipeline} == {"ok"}

        status = data / "pipeline-status.json"
        killed = json.loads(status.read_text())["pid"]
        os.kill(killed, signal.SIGKILL)
        event = json.dumps({**EVENT, "body": {"old": {}, "new": {"id": 1}}})
        assert invoke(*on_data, "publish", "-", stdin=event.encode()).code == 0
        assert '"id": 1' in invoke(*on_data, "next", "people", "--ack", "--wait", "120s").out
        up.wait_for("ready", "standby")
        wait_until(lambda: json.loads(status.read_text())["pid"] != killed)
        up.wait_for("standby", "pipeline")

        assert up.stop() == 0
        assert up.parts_with("stopped") == ["pipeline", "API", "push", "standby", "NATS", "everything"]
    finally:
        up.close()
