"""A healthy, busy system is calm: no alert, whatever moves. Its picture is the one in the README and the guide.

`make pictures` runs this test and takes over the picture.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from scripts.browser import find_browser
from tests.support.busy_system import PULLED, PUSHED, BusySystem
from tests.support.console import ARTIFACTS, Chromium

PICTURE = ARTIFACTS / "healthy.png"
MOVES = (
    "directory--queue:ldif",
    "queue:ldif--part:transform",
    "part:transform--queue:incoming",
    "publishers--queue:incoming",
    "queue:incoming--part:dispatch",
    "queue:incoming--part:archive",
    *(f"part:dispatch--sub:{name}" for name in (*PULLED, PUSHED, "billing")),
)
WARM = """() => Number(document.querySelector(".numbers > div > span").textContent.replace(/\\D/g, "")) > 1000"""
"""More than this number of events came in."""
FOR_THE_DOCS = os.environ.get("PURVEYOR_PICTURES") == "true"
_PATIENCE = 200_000.0


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Chromium]:
    """Return a browser in front of a system of its own."""
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium on this machine: python -m scripts.browser installs it, or says why not")
    with BusySystem(tmp_path) as system, Chromium(path, system.url) as chromium:
        yield chromium


@pytest.mark.first
@pytest.mark.spark
def test_a_healthy_busy_system_shows_no_alert_while_each_arrow_moves(browser: Chromium) -> None:
    async def work(page: Page) -> None:
        await page.goto("/")
        for arrow in MOVES:
            drawn = page.locator(f"svg.flow [data-arrow='{arrow}']")
            await expect(drawn).to_have_class(re.compile(r"\bbusy\b"), timeout=_PATIENCE)
        await expect(page.get_by_role("status")).to_have_text(re.compile("All is well"), timeout=_PATIENCE)
        await expect(page.locator(".alert")).to_have_count(0)
        await expect(page.locator("svg.flow [data-box='part:prefill'] .sub")).to_have_text("idle")
        await expect(page.locator("svg.flow [data-box='queue:dead-letters']")).to_be_in_viewport(ratio=1)
        if FOR_THE_DOCS:  # the first batches of a new JVM are slow
            await page.wait_for_function(WARM, timeout=_PATIENCE)
            await expect(page.locator(".alert")).to_have_count(0)
            await page.set_viewport_size({"width": 1280, "height": 760})
        ARTIFACTS.mkdir(parents=True, exist_ok=True)
        await page.screenshot(path=PICTURE, full_page=True)

    browser.visit(work)
