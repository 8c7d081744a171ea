"""Output that only a terminal gets: questions, a progress bar, bold headings."""

import pytest

from tests.support.command_line import Cli, on_terminal


@pytest.mark.parametrize(("typed", "code", "left"), [(b"n\n", 1, 3), (b"\x03", 130, 3), (b"y\n", 0, 0)])
@pytest.mark.filterwarnings("ignore:.*use of forkpty.*:DeprecationWarning")
def test_a_terminal_is_asked_before_a_purge(cli: Cli, stream: str, typed: bytes, code: int, left: int) -> None:
    cli("pub", f"{stream}.x", "y", "--count", "3").ok()
    ended, seen = on_terminal("stream", "purge", stream, until=b"[y/N]", type_in=typed)
    assert ended == code
    assert f"Remove messages from stream {stream}?" in seen
    assert "Traceback" not in seen
    assert cli("stream", "info", stream, "--json").ok().json["state"]["messages"] == left


@pytest.mark.filterwarnings("ignore:.*use of forkpty.*:DeprecationWarning")
def test_a_long_publish_shows_its_progress(cli: Cli, stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    code, seen = on_terminal("pub", f"{stream}.x", "y", "--count", "20000")
    assert code == 0
    assert "20000/20000" in seen
    assert f"Published 20000 messages to {stream}.x" in seen
    piped = cli("pub", f"{stream}.x", "y", "--count", "2000").ok()
    assert "\x1b" not in piped.out


@pytest.mark.filterwarnings("ignore:.*use of forkpty.*:DeprecationWarning")
def test_headings_are_bold_on_a_terminal_only(cli: Cli, stream: str) -> None:
    code, seen = on_terminal("stream", "ls", "--subject", f"{stream}.x")
    assert code == 0
    assert "\x1b[1m" in seen
    assert "\x1b" not in cli("stream", "ls").ok().out


@pytest.mark.filterwarnings("ignore:.*use of forkpty.*:DeprecationWarning")
def test_doctor_shows_that_it_works(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    _, seen = on_terminal("doctor")
    assert "checking" in seen.partition("ABOUT")[0]
    assert "checking" not in cli("doctor").err
