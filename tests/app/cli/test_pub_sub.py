import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.command_line import PROGRAM, Cli, Outcome
from tests.support.waiting import PATIENCE_SECONDS


def stored(cli: Cli, stream: str) -> list[str]:
    """All payloads of a stream, read through `sub`."""
    count = cli("stream", "info", stream, "--json").ok().json["state"]["messages"]
    if not count:
        return []
    outcome: Outcome = cli("sub", "--stream", stream, "--count", str(count), "--json")
    assert outcome.code == 0
    return [item["data"] for item in outcome.objects]


def test_pub_prints_where_a_message_is_stored(cli: Cli, stream: str) -> None:
    out = cli("pub", f"{stream}.x", "hello").ok().out
    assert out == f"Published 5 bytes to {stream}.x: stream {stream}, sequence 1\n"
    assert cli("pub", f"{stream}.x", "again", "--json").ok().json == {
        "subject": f"{stream}.x", "stream": stream, "sequence": 2, "duplicate": False
    }  # fmt: skip


def test_a_plain_message_has_no_headers(cli: Cli, stream: str) -> None:
    cli("pub", f"{stream}.x", "hello", "--count", "3").ok()
    for sequence in ("1", "2", "3"):
        assert cli("stream", "get", stream, sequence, "--json").ok().json["headers"] == {}


def test_the_payload_comes_from_a_word_a_file_or_standard_input(cli: Cli, stream: str) -> None:
    Path("payload").write_bytes(b"\0\1\2")
    cli("pub", f"{stream}.x").ok()
    cli("pub", f"{stream}.x", "--file", "payload").ok()
    cli("pub", f"{stream}.x", "-", stdin=b"piped").ok()
    got = [cli("stream", "get", stream, str(n), "--raw").ok().out for n in (1, 2, 3)]
    assert got == ["", "\0\1\2", "piped"]
    cli("pub", f"{stream}.x", "word", "--file", "payload").refused("one of them")
    cli("pub", f"{stream}.x", "--file", "nowhere").refused("nowhere")


def test_a_repeated_id_is_a_duplicate(cli: Cli, stream: str) -> None:
    cli("pub", f"{stream}.x", "-H", "Nats-Msg-Id:1", "hello1").ok()
    for number in (2, 3, 4):
        assert "a duplicate" in cli("pub", f"{stream}.x", "--msg-id", "1", f"hello{number}").ok().out
    assert stored(cli, stream) == ["hello1"]


def test_a_template_counts(cli: Cli, stream: str) -> None:
    arguments = ("pub", f"{stream}.x", "order {{Count}}", "--count", "3", "--msg-id", "id-{{Count}}")
    assert cli(*arguments).ok().out == f"Published 3 messages to {stream}.x: stream {stream}, last sequence 3\n"
    assert cli(*arguments, "--json").ok().json["duplicates"] == 3
    assert stored(cli, stream) == ["order 1", "order 2", "order 3"]


def test_many_messages_are_stored_once_and_in_order(cli: Cli, stream: str) -> None:
    report = cli("pub", f"{stream}.x", "{{Count}}", "--count", "3000", "-H", "Tag:a", "-H", "Tag:b", "--json").ok().json
    assert (report["stored"], report["last_sequences"]) == (3000, {stream: 3000})
    assert stored(cli, stream) == [str(number) for number in range(1, 3001)]
    assert cli("stream", "get", stream, "3000", "--json").ok().json["headers"]["Tag"] == ["a", "b"]


def test_no_ack_does_not_wait_for_the_server(cli: Cli, stream: str) -> None:
    sent = cli("pub", f"{stream}.x", "hello", "--no-ack", "--msg-id", "1", "--count", "2").ok().out
    assert "without acknowledgement" in sent
    assert cli("pub", "nobody.listens", "x", "--no-ack", "--json").ok().json["acknowledged"] is False
    assert stored(cli, stream) == ["hello"]


def test_a_message_may_expect_the_last_sequence(cli: Cli, stream: str) -> None:
    cli("pub", f"{stream}.x", "one", "--expect-last-sequence", "0").ok()
    cli("pub", f"{stream}.x", "two", "--expect-last-sequence", "0").refused("wrong last sequence")
    cli("pub", f"{stream}.x", "two", "--expect-last-sequence", "1").ok()
    cli("pub", f"{stream}.x", "x", "--expect-last-sequence", "1", "--count", "2").refused("one message")
    cli("pub", f"{stream}.x", "x", "--expect-last-sequence", "1", "--no-ack").refused("--no-ack")


def test_sub_reads_a_stream_and_leaves_no_consumer(cli: Cli, stream: str) -> None:
    cli("pub", f"{stream}.a", "order {{Count}}", "--count", "3").ok()
    cli("pub", f"{stream}.b", "-H", "Tag:x", "order 4").ok()
    last = cli("sub", "--stream", stream, "--deliver", "last", "--count", "1")
    assert last.out == f"[#1] Received on [{stream}.b]: 'order 4'\n    Tag: x\n"
    some = cli("sub", "--stream", stream, "--filter", f"{stream}.a", "--deliver", "2", "--count", "2", "--json")
    assert [item["sequence"] for item in some.objects] == [2, 3]
    newest = cli("sub", "--stream", stream, "--deliver", "subject", "--count", "2", "--json")
    assert [item["data"] for item in newest.objects] == ["order 3", "order 4"]
    none = cli("sub", "--stream", stream, "--deliver", "new", "--wait", "100ms", "--json")
    assert (none.code, none.objects) == (0, [])
    assert cli("consumer", "ls", stream, "--json").ok().json == []


def test_sub_replays_at_the_original_pace(cli: Cli, stream: str) -> None:
    cli("pub", f"{stream}.a", "order {{Count}}", "--count", "2").ok()
    out = cli("sub", "--stream", stream, "--replay", "original", "--count", "2", "--timestamps").out
    assert [line.split("[#")[1][0] for line in out.splitlines()] == ["1", "2"]


def test_sub_refuses_a_work_queue(cli: Cli, unique: str) -> None:
    cli("stream", "add", unique, "--retention", "work").ok()
    cli("sub", "--stream", unique).refused("work queue", "stream get")


def test_unprintable_characters_are_escaped(cli: Cli, stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cli("pub", f"{stream}.x", "größer").ok()
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = subprocess.run([*PROGRAM, "stream", "get", stream, "1"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == r"gr\xf6\xdfer"


@pytest.mark.parametrize("arguments", [(), ("x", "--stream", "y"), ("x", "--deliver", "last"), ("x", "--filter", "y")])
def test_sub_needs_a_subject_or_a_stream(cli: Cli, arguments: tuple[str, ...]) -> None:
    cli("sub", *arguments).refused()


def test_sub_watches_a_subject_until_ctrl_c(cli: Cli, stream: str) -> None:
    with subprocess.Popen(
        [*PROGRAM, "sub", f"{stream}.>", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as watcher:
        assert watcher.stderr is not None
        assert watcher.stdout is not None
        assert watcher.stderr.readline() == f"Listening on {stream}.>\n"
        cli("pub", f"{stream}.x", "hello").ok()
        assert json.loads(watcher.stdout.readline())["data"] == "hello"
        watcher.send_signal(signal.SIGINT)
        out, err = watcher.communicate(timeout=PATIENCE_SECONDS)
        assert (watcher.returncode, out, err) == (130, "", "")


def test_ctrl_c_ends_a_long_publish(cli: Cli, stream: str) -> None:
    with subprocess.Popen(
        [*PROGRAM, "pub", f"{stream}.x", "x", "--count", "100000000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as publisher:
        while cli("stream", "info", stream, "--json").ok().json["state"]["messages"] == 0:
            assert publisher.poll() is None
        publisher.send_signal(signal.SIGINT)
        out, err = publisher.communicate(timeout=PATIENCE_SECONDS)
        assert (publisher.returncode, out, err) == (130, b"", b"")


def test_a_closed_pipe_ends_the_command_without_an_error(cli: Cli, stream: str) -> None:
    cli("pub", f"{stream}.x", "x" * 1000, "--count", "2000", "--msg-id", "{{Count}}").ok()
    with subprocess.Popen(
        [*PROGRAM, "sub", "--stream", stream], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None
        assert reader.stderr is not None
        assert reader.stdout.readline().startswith("[#1]")
        reader.stdout.close()
        assert reader.stderr.read().splitlines()[1:] == []
        assert reader.wait(PATIENCE_SECONDS) == 1
