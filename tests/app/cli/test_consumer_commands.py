import subprocess

import pytest

from tests.support.command_line import PROGRAM, Cli
from tests.support.waiting import PATIENCE_SECONDS


def state(cli: Cli, stream: str, consumer: str) -> list[int]:
    """Delivered (consumer, stream), floor (consumer, stream), pending, redelivered."""
    info = cli("consumer", "info", stream, consumer, "--json").ok().json
    delivered, floor = info["delivered"], info["ack_floor"]
    return [
        *(pair[key] for pair in (delivered, floor) for key in ("consumer_seq", "stream_seq")),
        info["num_ack_pending"],
        info["num_redelivered"],
    ]


@pytest.fixture
def orders(cli: Cli, stream: str) -> str:
    """A stream with the messages order 1 to order 5."""
    cli("pub", f"{stream}.new", "order {{Count}}", "--count", "5").ok()
    return stream


def test_a_consumer_has_every_setting_it_was_given(cli: Cli, stream: str) -> None:
    config = cli(
        "consumer", "add", stream, "C", "--filter", f"{stream}.a", "--filter", f"{stream}.b", "--ack", "all",
        "--deliver", "7", "--replay", "original", "--wait", "20s", "--max-deliver", "4", "--backoff", "1s,5s,30s",
        "--max-pending", "9", "--sample", "80", "--headers-only", "--inactive-threshold", "1h",
        "--description", "all of it", "--json",
    ).ok().json["config"]  # fmt: skip
    wanted = {
        "durable_name": "C", "filter_subjects": [f"{stream}.a", f"{stream}.b"], "ack_policy": "all",
        "deliver_policy": "by_start_sequence", "opt_start_seq": 7, "replay_policy": "original", "max_deliver": 4,
        "backoff": [1.0, 5.0, 30.0], "max_ack_pending": 9, "sample_freq": "80%", "headers_only": True,
        "inactive_threshold_seconds": 3600.0, "description": "all of it",
    }  # fmt: skip
    assert {key: config[key] for key in wanted} == wanted
    cli("consumer", "add", stream, "C", "--max-pending", "3").refused("'C'")


def test_consumers_are_listed(cli: Cli, stream: str) -> None:
    cli("consumer", "add", stream, "PULL").ok()
    cli("consumer", "add", stream, "PUSH", "--target", f"out.{stream}").ok()
    lines = cli("consumer", "ls", stream).ok().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["PULL", "pull"], ["PUSH", "push"]]
    assert [item["name"] for item in cli("consumer", "ls", stream, "--json").ok().json] == ["PULL", "PUSH"]
    cli("consumer", "next", stream, "PUSH").refused(f"out.{stream}")


def test_the_numbers_of_an_acknowledgement(cli: Cli, orders: str) -> None:
    assert state(cli, orders, cli("consumer", "add", orders, "D", "--wait", "200ms", "--json").ok().json["name"]) == [
        0, 0, 0, 0, 0, 0
    ]  # fmt: skip
    out = cli("consumer", "next", orders, "D", "--confirm").ok().out
    assert out == f"--- received on {orders}.new\norder 1\n\nAcknowledged message, confirmed by the server\n"
    assert state(cli, orders, "D") == [1, 1, 1, 1, 0, 0]
    assert cli("consumer", "next", orders, "D", "--no-ack").ok().out == f"--- received on {orders}.new\norder 2\n"
    assert state(cli, orders, "D") == [2, 2, 1, 1, 1, 0]
    text = cli("consumer", "info", orders, "D").ok().out
    assert "Last Delivered Message: Consumer sequence: 2 Stream sequence: 2" in text
    assert "Acknowledgment floor: Consumer sequence: 1 Stream sequence: 1" in text
    assert "Pending Messages: 1\n" in text
    assert "Unprocessed Messages: 3\n" in text


def test_an_unanswered_message_is_redelivered(cli: Cli, stream: str) -> None:
    cli("pub", f"{stream}.new", "order 1").ok()
    cli("consumer", "add", stream, "D", "--wait", "200ms").ok()
    cli("consumer", "next", stream, "D", "--no-ack").ok()
    assert "(delivery 2)" in cli("consumer", "next", stream, "D", "--no-ack").ok().out
    assert state(cli, stream, "D") == [2, 1, 0, 0, 1, 1]
    assert "(delivery 3)" in cli("consumer", "next", stream, "D", "--confirm").ok().out
    assert state(cli, stream, "D") == [3, 1, 3, 1, 0, 0]


def test_ack_all_acknowledges_earlier_messages(cli: Cli, orders: str) -> None:
    cli("consumer", "add", orders, "A", "--ack", "all").ok()
    cli("consumer", "next", orders, "A", "--count", "4", "--no-ack").ok()
    assert state(cli, orders, "A")[4] == 4
    cli("consumer", "next", orders, "A", "--confirm").ok()
    assert state(cli, orders, "A") == [5, 5, 5, 5, 0, 0]


def test_ack_none_needs_no_answers(cli: Cli, orders: str) -> None:
    cli("consumer", "add", orders, "N", "--ack", "none").ok()
    assert cli("consumer", "next", orders, "N").ok().out == f"--- received on {orders}.new\norder 1\n"
    cli("consumer", "next", orders, "N", "--confirm").refused("needs no answers")
    cli("consumer", "next", orders, "N", "--answer", "term").refused("needs no answers")


def test_nak_redelivers_and_term_does_not(cli: Cli, orders: str) -> None:
    cli("consumer", "add", orders, "C").ok()
    out = cli("consumer", "next", orders, "C", "--answer", "nak", "--delay", "50ms", "--confirm").ok().out
    assert "redelivery after 50ms, confirmed" in out
    cli("consumer", "next", orders, "C", "--count", "4", "--answer", "ack", "--confirm").ok()
    again = cli("consumer", "next", orders, "C", "--answer", "term", "--reason", "broken", "--confirm").ok().out
    assert "Terminated message: broken" in again
    assert state(cli, orders, "C")[4] == 0
    cli("consumer", "next", orders, "C", "--wait", "100ms").refused("no message", "100ms")


def test_progress_extends_the_deadline_and_next_pulls_another_message(cli: Cli, orders: str) -> None:
    cli("consumer", "add", orders, "C").ok()
    extended = cli("consumer", "next", orders, "C", "--answer", "progress", "--confirm").ok().out
    assert "Extended the ack deadline" in extended
    assert state(cli, orders, "C")[4] == 1
    got = cli("consumer", "next", orders, "C", "--answer", "next", "--json").ok().objects
    assert [(item["data"], item["answer"]) for item in got] == [("order 2", "next"), ("order 3", "none")]


@pytest.mark.parametrize(
    "arguments", [("--delay", "1s"), ("--reason", "x"), ("--no-ack", "--confirm"), ("--answer", "next", "--confirm")]
)
def test_answers_that_make_no_sense_are_refused(cli: Cli, orders: str, arguments: tuple[str, ...]) -> None:
    cli("consumer", "add", orders, "C").ok()
    cli("consumer", "next", orders, "C", *arguments).refused()
    assert state(cli, orders, "C") == [0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("deliver", "first"),
    [("all", "order 1"), ("last", "order 5"), ("3", "order 3"), ("1h", "order 1"), ("subject", "order 5"),
     ("2020-01-01T00:00:00Z", "order 1")],
)  # fmt: skip
def test_the_start_of_a_consumer(cli: Cli, orders: str, deliver: str, first: str) -> None:
    cli("consumer", "add", orders, "C", "--deliver", deliver, "--ack", "none").ok()
    assert cli("consumer", "next", orders, "C", "--json").ok().json["data"] == first


def test_new_begins_with_later_messages(cli: Cli, orders: str) -> None:
    cli("consumer", "add", orders, "C", "--deliver", "new").ok()
    cli("pub", f"{orders}.new", "order 6").ok()
    assert cli("consumer", "next", orders, "C", "--json").ok().json["data"] == "order 6"


def test_max_deliver_ends_redelivery(cli: Cli, orders: str) -> None:
    arguments = ("--deliver", "last", "--max-deliver", "2", "--backoff", "50ms,100ms")
    cli("consumer", "add", orders, "C", *arguments).ok()
    assert cli("consumer", "next", orders, "C", "--no-ack", "--json").ok().json["delivered"] == 1
    assert cli("consumer", "next", orders, "C", "--no-ack", "--json").ok().json["delivered"] == 2
    cli("consumer", "next", orders, "C", "--wait", "300ms").refused("no message")


def test_a_pause_holds_messages_back_until_resumed(cli: Cli, orders: str) -> None:
    cli("consumer", "add", orders, "C").ok()
    assert cli("consumer", "pause", orders, "C", "1h").ok().out.startswith(f"Paused C of {orders} until ")
    assert "Paused For:" in cli("consumer", "info", orders, "C").ok().out
    cli("consumer", "next", orders, "C", "--wait", "100ms").refused("no message")
    cli("consumer", "resume", orders, "C").ok()
    assert cli("consumer", "next", orders, "C", "--json").ok().json["data"] == "order 1"
    cli("consumer", "pause", orders, "C", "2020-01-01T00:00:00Z").refused("over already")


def test_a_removed_consumer_is_gone(cli: Cli, orders: str) -> None:
    cli("consumer", "add", orders, "C").ok()
    cli("consumer", "rm", orders, "C").refused("--yes")
    assert cli("consumer", "rm", orders, "C", "--yes").ok().out == f"Removed C of {orders}\n"
    cli("consumer", "info", orders, "C").refused("'C'", orders)


def test_an_ephemeral_consumer_needs_no_name(cli: Cli, orders: str) -> None:
    made = cli("consumer", "add", orders, "--ephemeral", "--deliver", "last", "--json").ok().json
    assert "durable_name" not in made["config"]
    assert cli("consumer", "next", orders, made["name"], "--json").ok().json["data"] == "order 5"
    cli("consumer", "add", orders).refused("needs a name")
    cli("consumer", "add", orders, "C", "--pull", "--target", "x").refused("exclude")


def test_samples_are_shown_as_they_happen(cli: Cli, orders: str) -> None:
    cli("consumer", "add", orders, "PLAIN").ok()
    cli("consumer", "samples", orders, "PLAIN").refused("takes no samples")
    cli("consumer", "add", orders, "S", "--sample", "100").ok()
    with subprocess.Popen(
        [*PROGRAM, "consumer", "samples", orders, "S", "--count", "2"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as watcher:  # fmt: skip
        assert watcher.stderr is not None
        assert watcher.stderr.readline() == f"Waiting for samples of S on {orders}\n"
        cli("consumer", "next", orders, "S", "--count", "2").ok()
        out, _ = watcher.communicate(timeout=PATIENCE_SECONDS)
    lines = out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["sequence 1", "sequence 2"]
    assert "delivery 1, consumer sequence 1" in lines[0]
