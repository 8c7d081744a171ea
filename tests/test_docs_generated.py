"""Pages made from code are current, and every proof that is named exists."""

import re
from pathlib import Path

import pytest

from scripts.generate_docs import ROOT, pages


@pytest.mark.parametrize("path", pages(), ids=str)
def test_a_generated_page_is_current(path: Path) -> None:
    assert (ROOT / path).read_text() == pages()[path], "run `make docs`"


def test_every_proof_of_a_guarantee_is_a_test_that_exists() -> None:
    proofs = re.findall(r"`(tests/\S+?)::(\w+)`", (ROOT / "docs/guarantees.md").read_text())
    assert proofs
    for file, name in proofs:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}::{name}"


def test_every_relative_link_in_the_docs_leads_somewhere() -> None:
    written = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
    broken = []
    for page in written:
        for target, anchor in re.findall(r"\]\((?!https?://|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)", _prose(page)):
            place = page.parent / target if target else page
            if not place.exists() or (anchor and place.suffix == ".md" and anchor not in _anchors(place)):
                broken.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert broken == []


def _prose(page: Path) -> str:
    """What is no code: there a bracket is no link, and # no heading."""
    return re.sub(r"^(`{3,}).*?^\1|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def _anchors(page: Path) -> set[str]:
    """The names of its headings, as those who show Markdown make them."""
    text = re.sub(r"^(`{3,}).*?^\1", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
