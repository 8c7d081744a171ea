"""Every guide runs with the output that it shows."""

import re
from pathlib import Path

import pytest

from tests.docs.runner import GuideRunner, on_free_ports, runs_spark, starts_its_server
from tests.support.nats_servers import OwnServer

GUIDES = sorted((Path(__file__).parents[2] / "docs" / "guides").glob("*.md"))


def guide_params() -> list[object]:
    """Return the guides as parameters; those that run Spark have the mark `spark`."""
    return [
        pytest.param(guide, id=guide.stem, marks=[pytest.mark.spark] if runs_spark(guide) else []) for guide in GUIDES
    ]


@pytest.mark.parametrize("guide", guide_params())
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
        assert runner.run(guide) > 0


def test_there_are_guides() -> None:
    assert "jetstream" in {guide.stem for guide in GUIDES}


def test_guides_run_on_free_ports() -> None:
    """Guides run side by side, and beside other programs."""
    text = on_free_ports("at 17777 and 17778, twice 17777, position 177770")
    first, second, again = re.findall(r"\b[23][0-9]{4}\b", text)
    assert first == again != second
    assert text == f"at {first} and {second}, twice {first}, position 177770"
    assert {guide.stem for guide in GUIDES if runs_spark(guide)} >= {"quickstart", "archive", "pipeline", "spark"}
