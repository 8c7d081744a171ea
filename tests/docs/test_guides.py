"""Every guide does what it says."""

import re
from pathlib import Path

import pytest

from tests.docs.runner import GuideRunner, on_free_ports, runs_spark, starts_its_server
from tests.support.nats_servers import OwnServer

GUIDES = sorted((Path(__file__).parents[2] / "docs" / "guides").glob("*.md"))


def played() -> list[object]:
    """The guides; those that run Spark have its mark."""
    return [
        pytest.param(guide, id=guide.stem, marks=[pytest.mark.spark] if runs_spark(guide) else []) for guide in GUIDES
    ]


@pytest.mark.parametrize("guide", played())
def test_the_guide_does_what_it_says(
    guide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_server: OwnServer
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PURVEYOR_NATS_URL", raising=False)
    if not starts_its_server(guide):
        address = own_server().address
        (host, port), *_ = address.hosts()
        monkeypatch.setenv("PURVEYOR_NATS_URL", f"nats://{address.user}:{address.password}@{host}:{port}")
    with GuideRunner(tmp_path, monkeypatch.setenv) as runner:
        assert runner.play(guide) > 0


def test_there_are_guides() -> None:
    assert "jetstream" in {guide.stem for guide in GUIDES}


def test_guides_are_played_on_free_ports() -> None:
    """They are played side by side, and beside other programs."""
    played = on_free_ports("at 17777 and 17778, twice 17777, position 177770")
    first, second, again = re.findall(r"\b[23][0-9]{4}\b", played)
    assert first == again != second
    assert played == f"at {first} and {second}, twice {first}, position 177770"
    assert {guide.stem for guide in GUIDES if runs_spark(guide)} >= {"quickstart", "archive", "pipeline", "spark"}
