"""Every guide does what it says."""

import re
from pathlib import Path

import pytest

from tests.conftest import OwnServer
from tests.docs.runner import GuideRunner, starts_its_server

GUIDES = sorted((Path(__file__).parents[2] / "docs" / "guides").glob("*.md"))


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
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


def test_no_two_guides_listen_at_one_port() -> None:
    """They are played side by side."""
    ports = [port for guide in GUIDES for port in set(re.findall(r"\b1[78]\d{3}\b", guide.read_text()))]
    assert len(ports) > 5
    assert sorted(ports) == sorted(set(ports))
