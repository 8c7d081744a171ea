"""Many dead letters, use by keyboard only, and the progress of a prefill."""

import asyncio
import re
import uuid
from dataclasses import replace

from playwright.async_api import Locator, Page, expect

from purveyor.model.registration import PrefillState, PrefillStatus
from purveyor.queues.client import Queues
from purveyor.queues.registry import Registry
from tests.app.console.server_data import dead_letters, messages
from tests.support.console import Chromium, Site, picture

ROWS = "[aria-label='Dead letters'] tbody tr"
_MOST_STEPS = 60


async def tab_to(page: Page, wanted: Locator) -> None:
    """Press the tab key until the element has the focus."""
    for _ in range(_MOST_STEPS):
        if await wanted.evaluate("element => element.contains(document.activeElement)"):
            return
        await page.keyboard.press("Tab")
    raise AssertionError(f"{wanted} is not reached by the tab key")


def test_all_that_match_are_retried_and_all_that_match_are_discarded(site: Site, browser: Chromium, ox: str) -> None:
    """More than a page shows; what does not match stays."""
    dead_letters(site, ox, 2, "the disk is full")
    dead_letters(site, ox, 27, "no such mailbox", first=2)
    waiting = messages(site, ox)

    async def work(page: Page) -> None:
        await page.goto(f"/console/dead-letters?subscription={ox}")
        rows, asked = page.locator(ROWS), page.locator(".q-dialog .sheet")
        reason = page.get_by_label("Reason contains")
        others = page.locator(ROWS, has_text="disk")
        await expect(others).to_have_count(2)
        await reason.fill("mailbox")
        await expect(others).to_have_count(0)
        await page.get_by_role("button", name="Next").click()
        await expect(rows).to_have_count(2)
        await page.get_by_role("button", name="Retry all that match").click()
        await expect(asked).to_contain_text("Put 27 dead letters back?")
        await picture(page, "dead-letters-retry-all")
        await asked.get_by_role("button", name="Cancel").click()
        await expect(asked).to_have_count(0)
        await page.get_by_role("button", name="Retry all that match").click()
        await asked.get_by_role("button", name="Retry").click()
        await expect(page.locator(".empty")).to_contain_text("No match")
        await reason.fill("")
        await expect(rows).to_have_count(2)
        await page.get_by_role("button", name="Discard all that match").click()
        await expect(asked).to_contain_text("Discard 2 dead letters?")
        await asked.get_by_role("button", name="Discard").click()
        await expect(page.locator(".empty")).to_contain_text("No match")

    browser.visit(work)
    assert messages(site, ox) == waiting + 27
    assert site.admin.get(f"/v1/subscriptions/{ox}/dead-letters").json()["dead_letters"] == []


def test_a_letter_is_picked_read_and_discarded_by_keys_alone(site: Site, browser: Chromium, ox: str) -> None:
    dead_letters(site, ox, 2, "no such mailbox")

    async def work(page: Page) -> None:
        await page.goto("/console/dead-letters")
        rows, asked = page.locator(ROWS), page.locator(".q-dialog .sheet")
        await expect(page.get_by_label("Subscription")).to_be_visible()
        await page.keyboard.press("/")
        await expect(page.get_by_label("Subscription")).to_be_focused()
        await page.keyboard.type(ox)
        await expect(rows).to_have_count(2)
        await tab_to(page, rows.first.get_by_role("button"))
        await page.keyboard.press("Enter")
        await expect(asked).to_contain_text("no such mailbox")
        await expect(asked.get_by_role("button", name="Close")).to_be_focused()
        await page.keyboard.press("Escape")
        await expect(asked).to_have_count(0)
        await tab_to(page, rows.last.get_by_role("checkbox"))
        await page.keyboard.press("Space")
        await expect(rows.last.get_by_role("checkbox")).to_be_checked()
        await page.keyboard.press("Shift+Tab")  # and back, past the list, to what is done with it
        for _ in range(_MOST_STEPS):
            if await page.get_by_role("button", name="Discard picked").evaluate("e => e === document.activeElement"):
                break
            await page.keyboard.press("Shift+Tab")
        await page.keyboard.press("Enter")
        await expect(asked).to_contain_text("Discard 1 dead letter?")
        await expect(asked.get_by_role("button", name="Cancel")).to_be_focused()  # Enter alone does no harm
        await page.keyboard.press("Tab")
        await page.keyboard.press("Enter")
        await expect(rows).to_have_count(1)

    browser.visit(work)


def test_how_far_a_prefill_is_is_shown_while_it_runs(site: Site, browser: Chromium, ox: str) -> None:
    async def put(queues: Queues, written: int, total: int | None, job: str | None = None) -> None:
        registry = await Registry.open(queues)
        found = await registry.get(ox)
        running = PrefillState(
            incarnation=found.incarnation, status=PrefillStatus.RUNNING, position=1, attempt=1, written=written
        )
        await registry.put_prefill(ox, replace(running, total=total, job=job), found.prefill_revision)

    async def work(page: Page) -> None:
        await asyncio.to_thread(site.on_server, lambda queues: put(queues, 1200, None))
        await page.goto(f"/console/subscriptions/{ox}")
        reported = page.locator(".pairs div", has=page.get_by_text("Prefill", exact=True)).locator("dd")
        await expect(reported).to_have_text(re.compile(r"^running, 1\s200 objects so far$"))
        await asyncio.to_thread(site.on_server, lambda queues: put(queues, 1500, 3000))
        await expect(reported).to_have_text(re.compile(r"^1\s500 of 3\s000$"))
        await asyncio.to_thread(site.on_server, lambda queues: put(queues, 40, None, job=str(uuid.uuid4())))
        await expect(reported).to_have_text("replay running, 40 events so far")  # not a prefill
        await expect(page.locator(".alert", has_text=f"A replay to {ox} runs")).to_be_visible()
        begins = page.locator(".pairs div", has=page.get_by_text("Begins after", exact=True)).locator("dd")
        await expect(begins).to_have_text(re.compile(r"^\d+$"))

    browser.visit(work)
