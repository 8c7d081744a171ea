"""`purveyor import`: output, exit codes, and imports that are killed, interrupted or follow a file."""

import asyncio
import re
import signal
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from purveyor.jetstream.address import Address
from purveyor.model.errors import UnknownStream
from purveyor.queues.catalogue import LDIF
from purveyor.queues.client import Queues, connect
from purveyor.sources.ldif.ldif_parser import parse_ldif
from purveyor.sources.ldif.queue_store import BLOCK_RECORDS, Block, ImportLedger, RecordIdChain
from tests.support.command_line import PROGRAM, Cli, invoke, on_terminal, url_of
from tests.support.ldif_queue import expected, names, parked
from tests.support.ldif_text import people, person
from tests.support.proxy import TcpProxy
from tests.support.scale import chance, pick
from tests.support.waiting import PATIENCE_SECONDS, until, wait_until


def test_an_import_prints_a_summary(cli: Cli, unique: str) -> None:
    Path("people.ldif").write_bytes(people(3, unique))
    out = cli("import", "people.ldif", "--source", unique).ok().out
    counts = "3 added, 0 skipped, 0 dead letters"
    assert re.fullmatch(rf"Imported people\.ldif: {counts}; position \d+ in stream:ldif \([\d,]+ records/s\)\n", out)
    again = cli("import", "people.ldif", "--source", unique, "--json").ok().json
    reported = ("files", "records", "added", "skipped", "broken", "dry_run", "interrupted")
    assert [again[key] for key in reported] == [1, 3, 0, 3, 0, False, False]
    assert again["position"] >= 3


def test_the_source_is_the_name_of_the_file(cli: Cli, address: Address, unique: str) -> None:
    Path(f"{unique}.ldif").write_bytes(person(1, unique))
    cli("import", f"{unique}.ldif").ok()
    assert names(address, unique) == expected(1, unique)


def test_invalid_records_are_reported_with_their_line_and_exit_code_3(cli: Cli, address: Address, unique: str) -> None:
    Path("people.ldif").write_bytes(person(1, unique) + b"dn: cn=x\n\x1b[31mred\n\n" + person(2, unique))
    done = cli("import", "people.ldif", "--source", unique)
    assert done.code == 3
    assert done.err == "line 6: a line without a colon: '\\x1b[31mred' (stored as a dead letter)\n"
    assert "2 added, 0 skipped, 1 dead letters" in done.out
    assert len(parked(address, unique)) == 1
    assert cli("import", "people.ldif", "--source", unique).ok().out.startswith("Imported people.ldif: 0 added, 3 skip")


def test_standard_input_and_a_directory(cli: Cli, address: Address, unique: str) -> None:
    done = cli("import", "-", "--source", unique, "--json", stdin=people(2, unique))
    assert (done.code, done.json["added"]) == (0, 2)
    Path("all").mkdir()
    Path("all/b.ldif").write_bytes(person(4, unique))
    Path("all/a.ldif").write_bytes(person(3, unique) + b"bad\n\n")
    done = cli("import", "all", "--source", unique)
    assert (done.code, done.err) == (3, "all/a.ldif: line 6: a line without a colon: 'bad' (stored as a dead letter)\n")
    assert names(address, unique) == expected(4, unique)


def test_a_dry_run_needs_no_server(unique: str) -> None:
    Path("people.ldif").write_bytes(people(2, unique) + b"bad\n\n")
    done = invoke("import", "people.ldif", "--dry-run")
    assert (done.code, done.err) == (3, "line 11: a line without a colon: 'bad'\n")
    assert done.out == "Checked people.ldif: 2 valid, 1 invalid; nothing was stored\n"
    Path("empty.ldif").write_bytes(b"")
    assert invoke("import", "empty.ldif", "--dry-run", "--json").ok().json["records"] == 0


def test_invalid_arguments_are_refused(cli: Cli) -> None:
    Path("a.ldif").write_bytes(person(1))
    Path("empty").mkdir()
    cli("import", "nowhere.ldif").refused("nowhere.ldif cannot be read")
    cli("import", "empty").refused("no .ldif file")
    cli("import", "a.ldif", "--source", "a.b").refused("invalid source name")
    cli("import", "-", "--follow").refused("--follow needs one file")
    cli("import", "a.ldif", "--follow", "--dry-run").refused("--dry-run")
    Path("photo.ldif").write_bytes(b"".join(b"x%d\n\n" % number for number in range(200)))
    cli("import", "photo.ldif").refused("does not look like LDIF")


def test_a_directory_with_a_file_that_cannot_be_read_is_refused_before_any_is_sent(
    cli: Cli, address: Address, unique: str
) -> None:
    Path("all").mkdir()
    Path("all/a.ldif").write_bytes(person(1, unique))
    Path("all/b.ldif").symlink_to("nowhere")
    cli("import", "all", "--source", unique).refused("all/b.ldif cannot be read")
    assert names(address, unique) == []


def start(*argv: str, stdin: int | None = None) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*PROGRAM, "import", *argv], stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_on_server(address: Address, condition: Callable[[Queues], Awaitable[bool]]) -> None:
    """Wait until a condition holds on the server."""

    async def ask() -> None:
        async with connect(address) as queues:
            await until(lambda: condition(queues))

    asyncio.run(ask())


def wait_stored(address: Address, source: str, count: int, process: "subprocess.Popen[str]") -> None:
    """Wait until a running import has stored this number of records."""
    subject = f"ldif.{source}"

    async def enough(queues: Queues) -> bool:
        assert process.poll() is None, process.communicate()
        try:
            return (await queues.streams.subjects(LDIF.stream, subject)).get(subject, 0) >= count
        except UnknownStream:
            return False

    wait_on_server(address, enough)


def wait_noted(address: Address, text: bytes) -> None:
    """Wait until the ledger has a file of one block."""
    chain = RecordIdChain()
    block = Block([chain.append(item).id for item in parse_ldif([text])])

    async def noted(queues: Queues) -> bool:
        return await (await ImportLedger.open(queues, replicas=1)).count_known(block) == len(block.ids)

    wait_on_server(address, noted)


def wait_read(pid: int, file: Path) -> None:
    """Wait until a process has read a file to its end."""

    def position() -> int:
        for number in Path(f"/proc/{pid}/fd").iterdir():
            if number.exists() and number.samefile(file):
                about = Path(f"/proc/{pid}/fdinfo/{number.name}").read_text()
                return int(about.split()[1])
        return 0

    wait_until(lambda: position() >= file.stat().st_size)


@pytest.mark.chaos
def test_an_import_killed_at_any_moment_is_finished_by_the_next(cli: Cli, address: Address, unique: str) -> None:
    """kill -9 at random moments, several times; then each record is there once, in order."""
    random = chance("kill -9 while importing")
    count, kills = pick(8, 60) * BLOCK_RECORDS, pick(2, 12)
    Path("people.ldif").write_bytes(people(count, unique))
    for number in range(kills):
        with start("people.ldif", "--source", unique) as importing:
            wait_stored(address, unique, number * count // (kills + 1) + random.randrange(BLOCK_RECORDS), importing)
            importing.kill()
    tally = cli("import", "people.ldif", "--source", unique, "--json").ok().json
    assert tally["added"] > 0
    assert tally["records"] == count
    assert names(address, unique) == expected(count, unique)


def test_two_imports_of_one_file_in_two_processes(cli: Cli, address: Address, unique: str) -> None:
    Path("people.ldif").write_bytes(people(5 * BLOCK_RECORDS, unique))
    processes = [start("people.ldif", "--source", unique) for _ in range(2)]
    for process in processes:
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
        assert (process.returncode, err) == (0, ""), out
    assert names(address, unique) == expected(5 * BLOCK_RECORDS, unique)


@pytest.mark.usefixtures("cli")
def test_ctrl_c_ends_a_wait_for_a_slow_pipe_with_a_summary(address: Address, unique: str) -> None:
    with start("-", "--source", unique, stdin=subprocess.PIPE) as importing:
        assert importing.stdin is not None
        importing.stdin.write(people(2, unique).decode() + "dn: cn=half\n")
        importing.stdin.flush()
        wait_stored(address, unique, 2, importing)  # sent though the pipe is open and the block not full
        importing.send_signal(signal.SIGINT)
        assert importing.wait(PATIENCE_SECONDS) == 130
        assert importing.stdout is not None
        assert importing.stdout.read().startswith("Stopped importing -: 2 added, 0 skipped, 0 dead letters")
    assert names(address, unique) == expected(2, unique)


@pytest.mark.usefixtures("cli")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_followed_file_ends_with_a_signal_and_a_summary(
    address: Address, unique: str, number: signal.Signals
) -> None:
    file = Path("log.ldif")
    file.write_bytes(person(1, unique))
    with start("log.ldif", "--follow", "--source", unique) as following:
        assert following.stderr is not None
        assert following.stderr.readline() == "Following log.ldif\n"
        wait_stored(address, unique, 1, following)
        with file.open("ab") as end:
            end.write(person(2, unique) + person(3, unique)[:20])
        wait_stored(address, unique, 2, following)
        following.send_signal(number)
        out, err = following.communicate(timeout=PATIENCE_SECONDS)
    assert (following.returncode, err) == (0, "")
    assert out.startswith("Stopped importing log.ldif: 2 added, 0 skipped, 0 dead letters; position ")
    assert names(address, unique) == expected(2, unique)


def test_ctrl_c_does_not_wait_for_a_server_that_is_away(
    unique: str, address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Path("log.ldif")
    file.write_bytes(person(1, unique))
    with TcpProxy(*address.hosts()[0]) as proxy:
        monkeypatch.setenv("PURVEYOR_NATS_URL", url_of(proxy.address(address)))
        with start("log.ldif", "--follow", "--source", unique) as following:
            wait_noted(address, file.read_bytes())
            proxy.refuse()
            assert following.stderr is not None
            assert following.stderr.readline() == "Following log.ldif\n"
            assert following.stderr.readline() == "the server is away: waiting\n"
            with file.open("ab") as end:
                end.write(person(2, unique))
            wait_read(following.pid, file)
            following.send_signal(signal.SIGINT)
            out, _ = following.communicate(timeout=PATIENCE_SECONDS)
    assert following.returncode == 0
    assert out.startswith("Stopped importing log.ldif: 1 added")
    assert "1 not answered" in out or "not answered" not in out  # the signal may come before the record is sent
    monkeypatch.setenv("PURVEYOR_NATS_URL", url_of(address))
    assert invoke("import", "log.ldif", "--source", unique, "--json").ok().json["added"] == 1
    assert names(address, unique) == expected(2, unique)


@pytest.mark.usefixtures("cli")
@pytest.mark.filterwarnings("ignore:.*use of forkpty.*:DeprecationWarning")
def test_a_terminal_shows_the_bytes_read(unique: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    text = people(2000, unique) + b"bad\n\n"
    Path("people.ldif").write_bytes(text)
    code, seen = on_terminal("import", "people.ldif", "--source", unique)
    assert code == 3
    assert f"{len(text)}/{len(text)}" in seen
    assert "line 10001: a line without a colon: 'bad' (stored as a dead letter)" in seen
    assert "2000 added" in seen
