import json

import pytest

from tests.support.command_line import Cli


def test_a_stream_has_every_setting_it_was_given(cli: Cli, unique: str) -> None:
    config = cli(
        "stream", "add", unique, "-s", f"{unique}.a,{unique}.b", "-s", f"{unique}.c.*", "--retention", "work",
        "--discard", "new", "--discard-per-subject", "--max-msgs", "10", "--max-bytes", "1MiB", "--max-age", "1h",
        "--max-msg-size", "1KiB", "--max-msgs-per-subject", "3", "--dupe-window", "30s", "--storage", "memory",
        "--no-ack", "--description", "all of it", "--no-allow-direct", "--allow-atomic", "--compression", "none",
        "--replicas", "1", "--json",
    ).ok().json["config"]  # fmt: skip
    wanted = {
        "subjects": [f"{unique}.a", f"{unique}.b", f"{unique}.c.*"], "retention": "workqueue", "discard": "new",
        "discard_new_per_subject": True, "max_msgs": 10, "max_bytes": 1048576, "max_age_seconds": 3600.0,
        "max_msg_size": 1024, "max_msgs_per_subject": 3, "duplicate_window_seconds": 30.0, "storage": "memory",
        "no_ack": True, "description": "all of it", "allow_direct": False, "allow_atomic": True, "num_replicas": 1,
    }  # fmt: skip
    assert {key: config[key] for key in wanted} == wanted


def test_adding_the_same_stream_again_works_and_other_settings_fail(cli: Cli, stream: str) -> None:
    cli("stream", "add", stream, "--subjects", f"{stream}.>").ok()
    cli("stream", "add", stream, "--subjects", f"{stream}.>", "--max-msgs", "7").refused(stream, "fix:")


def test_a_stream_without_subjects_takes_its_name(cli: Cli, unique: str) -> None:
    assert cli("stream", "add", unique, "--json").ok().json["config"]["subjects"] == [unique]


def test_what_can_change_in_place_changes_and_the_rest_stays(cli: Cli, stream: str) -> None:
    changed = cli("stream", "edit", stream, "--max-msgs", "5", "--description", "new", "--json").ok().json["config"]
    assert (changed["max_msgs"], changed["description"], changed["subjects"]) == (5, "new", [f"{stream}.>"])
    assert "Maximum Messages: 5" in cli("stream", "edit", stream, "--max-age", "1h").ok().out
    cli("stream", "edit", stream).refused("nothing to change")
    cli("stream", "edit", stream, "--retention", "work").refused("10052")


def test_streams_are_listed(cli: Cli, stream: str) -> None:
    cli("pub", f"{stream}.x", "hello").ok()
    lines = cli("stream", "ls").ok().out.splitlines()
    assert lines[0].split() == ["NAME", "SUBJECTS", "RETENTION", "MESSAGES", "BYTES", "LASTSEQ", "CONSUMERS"]
    assert any(line.startswith(stream) for line in lines)
    found = cli("stream", "ls", "--subject", f"{stream}.x", "--json").ok().json
    assert [item["config"]["name"] for item in found] == [stream]
    assert cli("--json", "stream", "ls").ok().json


def test_a_small_message_takes_39_bytes_and_info_says_why(cli: Cli, unique: str) -> None:
    subject = unique[-4:]
    cli("stream", "add", unique, "--subjects", subject).ok()
    cli("pub", subject, "hello").ok()
    out = cli("stream", "info", unique).ok().out
    assert "Average Message: 39 B" in out
    assert "Overhead: 34 B = 4 length + 8 sequence + 8 time + 2 subject length + 4 subject + 8 hash" in out
    assert "Content: 5 B of payload" in out
    shown = cli("stream", "info", unique, "--json").ok().json
    assert shown["state"]["bytes"] == 39
    assert shown["storage"] == {
        "average_message_bytes": 39.0, "average_subject_bytes": 4.0, "overhead_bytes": 34.0
    }  # fmt: skip


def test_order_4_takes_53_bytes(cli: Cli, unique: str) -> None:
    subject = f"{unique[-6:]}.processed"
    cli("stream", "add", unique, "--subjects", subject).ok()
    cli("pub", subject, "order 4").ok()
    assert "Bytes: 53 B" in cli("stream", "info", unique).ok().out


def test_a_message_is_shown_with_headers_and_safely(cli: Cli, stream: str) -> None:
    cli("pub", f"{stream}.x", "-H", "Tag:a", "-H", "Tag:b", "two\nlines").ok()
    cli("pub", f"{stream}.x", "-", stdin=b"\x1b[31m\xff").ok()
    text = cli("stream", "get", stream, "1").ok().out
    assert text.splitlines()[1:] == ["Tag: a", "Tag: b", "", "two", "lines"]
    binary = cli("stream", "get", stream, "2").ok().out
    assert "\x1b" not in binary
    assert "1b 5b 33 31 6d ff" in binary
    shown = cli("stream", "get", stream, "--last-for", f"{stream}.*", "--json").ok().json
    assert (shown["sequence"], shown["data_base64"]) == (2, "G1szMW3/")


def test_raw_bytes_are_written_as_they_are(cli: Cli, stream: str) -> None:
    payload = "größe\r\n\0".encode()
    cli("pub", f"{stream}.x", "-", stdin=payload).ok()
    assert cli("stream", "get", stream, "1", "--raw").ok().out.encode() == payload


@pytest.mark.parametrize("arguments", [(), ("1", "--last-for", "x"), ("0",)])
def test_a_message_is_named_by_sequence_or_subject(cli: Cli, stream: str, arguments: tuple[str, ...]) -> None:
    cli("stream", "get", stream, *arguments).refused()


def test_messages_are_purged_only_after_confirmation(cli: Cli, stream: str) -> None:
    cli("pub", f"{stream}.a", "x", "--count", "10").ok()
    cli("pub", f"{stream}.b", "x", "--count", "5").ok()
    cli("stream", "purge", stream).refused("--yes")
    assert cli("stream", "purge", stream, "--subject", f"{stream}.b", "--yes").ok().out.startswith("Removed 5 ")
    assert cli("stream", "purge", stream, "--before", "4", "--yes", "--json").ok().json["purged"] == 3
    assert cli("stream", "purge", stream, "--keep", "1", "--yes", "--json").ok().json["purged"] == 6
    cli("stream", "purge", stream, "--keep", "1", "--before", "2", "--yes").refused("not both")


def test_a_sealed_stream_stores_no_messages(cli: Cli, stream: str) -> None:
    cli("stream", "seal", stream).refused("--yes")
    assert cli("stream", "seal", stream, "--yes").ok().out == f"Sealed {stream}\n"
    cli("pub", f"{stream}.x", "hello").refused("sealed", "10109")
    assert "Sealed: yes" in cli("stream", "info", stream).ok().out


def test_a_removed_stream_is_gone(cli: Cli, stream: str) -> None:
    cli("stream", "rm", stream).refused("--yes")
    assert cli("stream", "rm", stream, "--yes", "--json").ok().json == {"stream": stream, "removed": True}
    cli("stream", "info", stream).refused(stream)


def test_discard_new_refuses_at_the_limit(cli: Cli, unique: str) -> None:
    cli("stream", "add", unique, "--max-msgs", "1", "--discard", "new").ok()
    cli("pub", unique, "one").ok()
    cli("pub", unique, "two").refused("10077")


def test_json_is_json_even_with_odd_content(cli: Cli, stream: str) -> None:
    cli("pub", f"{stream}.x", "-H", "Odd:ä\x07", '{"quoted": "\\u0000"}').ok()
    shown = cli("stream", "get", stream, "1", "--json").ok()
    assert json.loads(shown.out)["headers"]["Odd"] == ["ä\x07"]
