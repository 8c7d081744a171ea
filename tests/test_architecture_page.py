"""docs/architecture.md names files and packages that exist, and the rules of the source hold."""

import re
from pathlib import Path

import pytest

from scripts import check_source

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "purveyor"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_file_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*/[a-z_]+\.py)`", PAGE))
    assert len(named) > 50
    missing = [each for each in sorted(named) if not any((base / each).exists() for base in (PACKAGE, ROOT))]
    assert missing == []


def test_every_module_of_a_walk_exists() -> None:
    rows = re.findall(r"^\| `([a-z_/]+)/` \| (.+) \|$", PAGE, re.MULTILINE)
    assert len(rows) > 15
    modules = [PACKAGE / folder / f"{name}.py" for folder, names in rows for name in re.findall(r"`(\w+)`", names)]
    assert [str(path) for path in modules if not path.is_file()] == []


def test_every_class_and_function_that_the_page_names_exists() -> None:
    answers = PAGE.split("## Two walks")[0]
    named = set(re.findall(r"`([A-Z][a-z]\w*(?:\.[a-z_]+)?|[a-z]+_[a-z_]+|decide)`", answers))
    assert len(named) > 5
    source = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    defined = set(re.findall(r"^\s*(?:async )?(?:class|def) (\w+)", source, re.MULTILINE))
    assert {each for each in named if not set(each.split(".")) <= defined} == set()


@pytest.mark.parametrize(
    "question",
    [
        "Where is a lease granted?",
        "Where does an event become a row?",
        "Where is a push retried?",
        "Where is a queue created?",
        "Where is a password checked?",
        "Where is a dead letter put back?",
    ],
)
def test_the_page_answers_the_questions_of_a_newcomer(question: str) -> None:
    [answer] = re.findall(rf"^\| {re.escape(question)} \| (.+) \|$", PAGE, re.MULTILINE)
    assert re.search(r"`\w+/[\w/]+\.py`", answer)


def test_the_page_lists_the_packages() -> None:
    listed = set(re.findall(r"^  ([a-z]+)/ ", PAGE, re.MULTILINE))
    assert listed == {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


def test_modules_have_one_idea_a_name_of_their_own_and_plain_words() -> None:
    assert check_source.check(ROOT) == []


def test_the_rules_of_the_source_find_what_they_are_for(tmp_path: Path) -> None:
    for folder in ("scripts", "benchmarks"):
        (tmp_path / folder).mkdir()
    for number in range(4):
        module = tmp_path / "src" / f"p{number}" / "store.py"
        module.parent.mkdir(parents=True)
        module.write_text('"""Stores things."""\n')
    (tmp_path / "src" / "long.py").write_text("x = 1\n" * 451)
    (tmp_path / "src" / "riddle.py").write_text('"""A bell."""\n\n\ndef ring() -> None:\n    """Tell who waits."""\n')
    (tmp_path / "src" / "comment.py").write_text("x = 1  # nobody knows\n")
    (tmp_path / "src" / "message.py").write_text('x = f"{1} restarts by itself"\n')
    (tmp_path / "README.md").write_text("# Title\n\n`nobody` is a name.\n\n```sh\nwhoever\n```\n\nA queue is\ntold.\n")
    found = check_source.check(tmp_path)
    assert len(found) == 6
    assert found[0].startswith("src/long.py: 451 lines")
    assert found[1].startswith("4 modules are called store.py")
    assert found[2].startswith("src/comment.py:1: 'nobody'")
    assert found[3].startswith("src/message.py:1: 'by itself'")
    assert found[4].startswith("src/riddle.py:5: 'who waits'")
    assert found[5].startswith("README.md:9: 'is told'")
