"""Every guide runs with the output that it shows."""

import codeop
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.slapd import is_ready
from tests.docs.markdown import blocks
from tests.docs.runner import (
    ONE_PROGRAM,
    GuideRunner,
    RunningUp,
    commands,
    on_free_ports,
    runs_spark,
    starts_its_server,
    starts_up,
)
from tests.support.nats_servers import OwnServer

GUIDES = sorted((Path(__file__).parents[2] / "docs" / "guides").glob("*.md"))


def guide_params() -> list[object]:
    """Return the guides as parameters; those that run Spark have the mark `spark`.

    The guides that need no `purveyor up` are first: it would take processor time from them.
    """
    ordered = sorted(GUIDES, key=starts_up)
    return [pytest.param(guide, id=guide.stem, marks=marks(guide)) for guide in ordered]


def marks(guide: Path) -> list[pytest.MarkDecorator]:
    """Return the marks of a guide: it runs Spark, or a program that this machine does not have."""
    found = [pytest.mark.spark] if runs_spark(guide) else []
    if any("slapd -f" in step.command for step in commands(guide)) and not is_ready():
        found.append(pytest.mark.skip(reason="no slapd: python -m scripts.slapd installs it where that is allowed"))
    return found


@pytest.fixture(scope="module")
def running_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningUp]:
    up = RunningUp(tmp_path_factory.mktemp("up"), GUIDES)
    yield up
    up.stop()


@pytest.mark.parametrize("guide", guide_params())
def test_the_guide_does_what_it_says(
    guide: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own_server: OwnServer,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PURVEYOR_NATS_URL", raising=False)
    up: RunningUp | None = request.getfixturevalue("running_up") if starts_up(guide) else None
    if up is None and not starts_its_server(guide):
        address = own_server().address
        (host, port), *_ = address.hosts()
        monkeypatch.setenv("PURVEYOR_NATS_URL", f"nats://{address.user}:{address.password}@{host}:{port}")
    with GuideRunner(tmp_path, monkeypatch.setenv, up) as runner:
        assert runner.run(guide) > 0


def test_a_guide_says_that_its_python_is_one_program() -> None:
    said = {guide.stem for guide in GUIDES if "one program" in " ".join(guide.read_text(encoding="utf-8").split())}
    assert said == set(ONE_PROGRAM)


@pytest.mark.parametrize("name", ONE_PROGRAM)
def test_one_program_can_be_typed_into_python_line_by_line(name: str) -> None:
    """The prompt of Python takes a line that is not indented as an error inside a block that no empty line ended."""
    (guide,) = (each for each in GUIDES if each.stem == name)
    compile_typed = codeop.CommandCompiler()
    for block in blocks(guide.read_text(encoding="utf-8")):
        typed: list[str] = []
        for number, line in enumerate((*block.lines, ""), block.line + 1) if block.language == "python" else ():
            typed.append(line)
            try:
                is_complete = compile_typed("\n".join(typed), symbol="single") is not None
            except SyntaxError as error:
                pytest.fail(f"{guide.name}:{number}: {line!r}: {error}")
            if is_complete:
                typed = []
        assert not typed, f"{guide.name}:{block.line}: the block ends inside a statement"


def test_a_reader_waits_for_one_command_and_not_for_a_server() -> None:
    """A plain `wait` waits for all background commands of the shell, also for `purveyor serve nats &`."""
    waits = [step.command for guide in GUIDES for step in commands(guide) if step.command.split()[0] == "wait"]
    assert {*waits} == {"wait $!"}


def test_no_guide_puts_messages_into_the_queue_of_a_subscription() -> None:
    """A reader who does so sees what Purveyor never writes."""
    for guide in GUIDES:
        assert not [step for step in commands(guide) if re.search(r"purveyor pub [\w-]+\.main", step.command)], guide


def test_there_are_guides() -> None:
    assert "jetstream" in {guide.stem for guide in GUIDES}


def test_guides_run_on_free_ports() -> None:
    """Guides run side by side, and beside other programs."""
    text = on_free_ports("at 17777 and 17778, twice 17777, position 177770")
    first, second, again = re.findall(r"\b[23][0-9]{4}\b", text)
    assert first == again != second
    assert text == f"at {first} and {second}, twice {first}, position 177770"
    assert {guide.stem for guide in GUIDES if runs_spark(guide)} >= {"quickstart", "archive", "pipeline", "spark"}
