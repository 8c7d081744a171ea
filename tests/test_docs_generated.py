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
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
    links = [
        (page, target) for page in pages for target in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", page.read_text())
    ]
    broken = [f"{page.relative_to(ROOT)}: {target}" for page, target in links if not (page.parent / target).exists()]
    assert broken == []
