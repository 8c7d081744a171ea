"""Each page in a real browser: it shows the state, its actions work, and the browser logs no errors."""

import json
import re
import threading
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

from playwright.async_api import Page, expect

from purveyor.delivery.push.push_reports import AttemptLog
from purveyor.delivery.push.settlement import Outcome
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.config import Retention, StreamConfig
from purveyor.model.registration import DispatchState, Suspension
from purveyor.pipeline.part_status import State
from purveyor.queues.catalogue import PREFILL, PREFILL_FAILURES
from purveyor.queues.client import Queues
from purveyor.queues.registry import SUBSCRIPTIONS, Registry
from tests.app.console.reading import BROKEN_NAMES, HARD_TO_READ, TABS_OUT_OF_SIGHT, UNTOLD
from tests.app.console.server_data import all_parts, dead_letters, messages, part, read_incoming
from tests.support.console import Chromium, Site, log_in, picture
from tests.support.running_api import fill

PAGES = {
    "overview": "/",
    "queues": "/console/queues",
    "subscriptions": "/console/subscriptions",
    "dead-letters": "/console/dead-letters",
    "pipeline": "/console/pipeline",
}


def test_a_login_leads_to_the_page_that_was_wanted_and_a_wrong_one_says_so(site: Site, browser: Chromium) -> None:
    async def work(page: Page) -> None:
        await log_in(page, password="wrong", path="/console/pipeline")
        await expect(page.get_by_role("alert")).to_contain_text("not accepted")
        await page.fill("input[name=password]", "admin-secret")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("heading", level=1)).to_have_text("Pipeline")
        await page.get_by_role("button", name="Log out").click()
        await expect(page).to_have_url(f"{site.url}/console/login")

    browser.visit(work, logged_in=False, errors=True)  # a refused login is one, for a browser


def test_the_overview_is_live_and_red_where_something_is_stuck(site: Site, browser: Chromium, ox: str) -> None:
    read_incoming(site)  # else the events of other tests wait for the archive, and it is stuck after five minutes

    async def work(page: Page) -> None:
        site.post(*all_parts())
        await page.goto("/")
        await expect(page.locator("svg.flow .name", has_text="dispatch")).to_be_visible()
        await expect(page.locator("svg.flow [data-box='part:archive'] g")).to_have_class("box fine")
        way = page.locator(f"svg.flow [data-arrow$='--sub:{ox}']")  # its rate, what waits, and the age of the oldest
        await expect(way.locator(".rate")).to_have_text(re.compile(r"^[\d.,k]+/s$"))
        await expect(way.locator(".backlog")).to_have_text(re.compile(r"^30 · \d+ ?\w+$"))
        site.post(*all_parts(archive=part("archive", State.FAILED, error="no space left on device")))
        stuck = page.locator(".alert.stuck", has_text="archive cannot run")
        await expect(stuck).to_contain_text("no space left on device")
        await expect(stuck).to_contain_text("Next:")
        await expect(page.locator("svg.flow [data-box='part:archive'] g")).to_have_class("box stuck")
        await picture(page, "overview-stuck")
        site.post(*all_parts())
        await expect(stuck).to_have_count(0)
        await page.locator(f"svg.flow [data-box='sub:{ox}']").click()
        await expect(page.get_by_role("heading", level=1)).to_have_text(ox)

    browser.visit(work)


def test_alerts_are_lines_that_open_and_leave_the_figures_on_the_screen(
    site: Site, browser: Chromium, unique: str
) -> None:
    """Six troubles at once: each is one line, the most urgent one is open, and a line that was opened stays so."""
    names = [f"{unique.lower()[:50]}-{number}" for number in range(3)]

    async def suspend(queues: Queues) -> None:
        registry = await Registry.open(queues)
        for name in names:
            found = await registry.get(name)
            why = Suspension(position=9, reason="the queue is full", at=datetime.now(UTC))
            state = DispatchState(incarnation=found.incarnation, next=9, suspended=why)
            await registry.put_dispatch(name, state, found.dispatch_revision)

    for name in names:
        site.subscribe(name)
    site.on_server(suspend)
    dead_letters(site, names[0], 1, "no such mailbox")

    async def work(page: Page) -> None:
        broken = part("archive", State.FAILED, error="no space left on device")
        site.post(*all_parts(archive=broken))
        await page.goto("/")
        await expect(page.locator(".alert.stuck")).to_have_count(2)
        await page.reload()  # a line stays open that was the most urgent one for a moment
        urgent, group = page.locator(".alert.stuck").nth(0), page.locator(".alert.stuck").nth(1)
        await expect(urgent.get_by_text("Next:")).to_be_visible()
        await expect(group.get_by_text("subscriptions are suspended")).to_be_visible()
        step = group.get_by_text("Next: Fix the cause, then resume it")
        await expect(step).to_be_hidden()
        await expect(page.locator(".numbers")).to_be_in_viewport(ratio=1)
        await expect(page.locator("svg.flow [data-box='queue:incoming']")).to_be_in_viewport(ratio=1)
        await picture(page, "overview-alerts")
        await group.locator("summary").focus()
        await page.keyboard.press("Enter")  # as with the mouse
        await expect(step).to_be_visible()
        await expect(group.get_by_role("link", name=names[0], exact=True)).to_be_visible()
        site.post(*all_parts())  # the line above goes, and comes again
        line = page.locator(".alert.stuck", has_text="subscriptions are suspended")
        await expect(urgent).to_contain_text("subscriptions are suspended")
        await expect(line.get_by_text("Next: Fix")).to_be_visible()
        site.post(*all_parts(archive=broken))
        await expect(urgent).to_contain_text("archive cannot run")
        await expect(line.get_by_text("Next: Fix")).to_be_visible()
        await line.get_by_role("link", name=names[1], exact=True).click()
        await expect(page.get_by_role("heading", level=1)).to_have_text(names[1])
        await expect(page.locator(".alert.stuck")).to_contain_text("is suspended")
        await expect(page.locator(".alert.stuck").get_by_text("Next:")).to_be_visible()

    try:
        browser.visit(work)
    finally:
        for name in names:
            site.admin.delete(f"/v1/subscriptions/{name}")


def test_a_subscription_that_is_not_understood_is_shown_with_the_reason_and_can_only_be_deleted(
    site: Site, browser: Chromium, ox: str
) -> None:
    async def upgrade(queues: Queues) -> None:
        bucket = await queues.bucket(SUBSCRIPTIONS)
        record = json.loads((await bucket.get(f"{ox}.definition")).value)
        await bucket.put(f"{ox}.definition", json.dumps({**record, "version": 2}).encode())

    site.on_server(upgrade)

    async def work(page: Page) -> None:
        await page.goto("/console/subscriptions")
        row = page.locator("[aria-label=Subscriptions] tbody tr", has_text=ox)
        await expect(row).to_contain_text("unreadable")
        await expect(row).to_contain_text("30")
        await row.get_by_role("link", name=ox).click()
        await expect(page.get_by_role("heading", level=1)).to_have_text(ox)
        await expect(page.locator(".alert.stuck", has_text=ox)).to_contain_text("version 2")
        await expect(page.get_by_role("button", name="Pause")).to_have_count(0)
        await page.get_by_role("button", name="Delete …").click()
        await page.get_by_role("button", name="Delete", exact=True).click()
        await expect(page).to_have_url(f"{site.url}/console/subscriptions")
        await expect(row).to_have_count(0)

    browser.visit(work)


def test_messages_are_browsed_without_being_taken(site: Site, browser: Chromium, ox: str) -> None:
    async def work(page: Page) -> None:
        await page.goto("/console/queues")
        others = page.get_by_role("link", name="incoming", exact=True)
        await expect(others).to_have_count(1)
        await page.get_by_label("Filter queues").fill(ox)
        await expect(others).to_have_count(0)  # drawn anew: a click before that may meet a link that goes
        await page.get_by_role("link", name=ox).click()
        rows = page.locator("[aria-label=Messages] tbody tr")
        await expect(rows).to_have_count(20)
        await page.get_by_role("button", name="Next").click()
        await expect(rows).to_have_count(10)
        await page.get_by_role("button", name="Oldest").click()
        await expect(rows).to_have_count(20)
        await expect(rows.first.locator("[data-title=Topic]")).to_have_text("udm:users/user")
        await expect(rows.first.locator("[data-title=Key]")).to_have_text("u-1")
        await rows.first.get_by_role("button").click()
        modal = page.locator(".q-dialog .sheet")
        await expect(modal).to_contain_text('"uuid": "u-1"')
        await expect(modal).to_contain_text("Purveyor-Position: 1")
        await picture(page, "message")
        await page.keyboard.press("Escape")
        await expect(modal).to_have_count(0)
        # One that the API's own user may not read.
        await page.goto("/console/queues?queue=incoming")
        readers = page.locator("[aria-label=Readers]")
        archive = readers.locator("tbody tr", has_text="archive")
        for title in ("Ack floor", "Pending", "Unanswered", "Redelivered"):
            await expect(readers.locator("th", has_text=title)).to_be_visible()
            await expect(archive.locator(f"[data-title='{title}']")).to_have_text(re.compile(r"^[\d,]+$"))
        for title in ("State", "Messages", "Size", "Oldest"):
            await expect(page.locator("dt", has_text=title)).to_be_visible()
        await expect(page.locator("[aria-label=Messages] tbody tr").first).to_contain_text("incoming")

    browser.visit(work)
    assert messages(site, ox) == 30


def test_a_migration_is_planned_asked_about_and_applied(site: Site, browser: Chromium) -> None:
    other = StreamConfig(name=PREFILL_FAILURES.stream, subjects=PREFILL_FAILURES.subjects, retention=Retention.LIMITS)

    async def remake(queues: Queues) -> None:
        await queues.streams.remove(PREFILL_FAILURES.stream)
        await queues.streams.add(other)

    async def retention(queues: Queues) -> Retention:
        return (await queues.streams.info(PREFILL_FAILURES.stream)).config.retention

    async def work(page: Page) -> None:
        await page.goto("/console/queues?queue=prefill-failures")
        await page.get_by_role("button", name="Plan").click()
        await expect(page.locator("[aria-label='The plan']")).to_contain_text("migrate by snapshot")
        await page.get_by_role("button", name="Apply").click()
        asked = page.locator(".q-dialog .sheet")
        await expect(asked).to_contain_text("publishers and readers wait")
        await asked.get_by_role("button", name="Cancel").click()
        await expect(asked).to_have_count(0)
        await page.get_by_role("button", name="Apply").click()
        await page.locator(".q-dialog .sheet").get_by_role("button", name="Apply").click()
        await expect(page.locator(".empty", has_text="Nothing to do")).to_be_visible()

    site.on_server(remake)
    browser.visit(work)
    assert site.on_server(retention) is Retention.WORK_QUEUE


def test_a_subscription_is_paused_resumed_replayed_and_deleted(site: Site, browser: Chromium, ox: str) -> None:
    jobs = messages(site, PREFILL.name)

    async def work(page: Page) -> None:
        await page.goto(f"/console/subscriptions/{ox}")
        await expect(page.locator(".numbers").first).to_contain_text("30")
        await expect(page.locator("canvas")).to_have_count(2)
        await page.get_by_role("button", name="Pause").click()
        await expect(page.locator(".badge", has_text="paused")).to_be_visible()
        with site.consumer(ox) as consumer:
            assert consumer.get(f"/v1/subscriptions/{ox}/messages/next?timeout=0").json() is None
        await page.get_by_role("button", name="Resume").click()
        await expect(page.locator(".badge", has_text="active")).to_be_visible()
        await page.get_by_role("button", name="Replay").click()
        form = page.locator(".q-dialog .sheet")
        await form.get_by_label("From").fill("yesterday")
        await form.get_by_role("button", name="Replay").click()
        await expect(page.get_by_text("neither a position nor a time")).to_be_visible()
        await form.get_by_label("From").fill("99999999")
        await form.get_by_role("button", name="Replay").click()
        await expect(page.get_by_text("begins at position 99999999, and the newest position is")).to_be_visible()
        await expect(form).to_be_visible()
        await form.get_by_label("From").fill("1")
        await form.get_by_role("button", name="Replay").click()
        await expect(form).to_have_count(0)
        await page.get_by_role("button", name="Replay").click()
        await form.get_by_label("From").fill("1")
        await form.get_by_role("button", name="Replay").click()
        await expect(page.get_by_text("waits already, job")).to_be_visible()
        await form.get_by_role("button", name="Cancel").click()
        await expect(form).to_have_count(0)
        await picture(page, "subscription")
        await page.get_by_role("button", name="Delete").click()
        await page.locator(".q-dialog .sheet").get_by_role("button", name="Delete").click()
        await expect(page).to_have_url(f"{site.url}/console/subscriptions")

    browser.visit(work)
    assert messages(site, PREFILL.name) == jobs + 1
    assert site.admin.get(f"/v1/subscriptions/{ox}").status_code == 404


class Endpoint(BaseHTTPRequestHandler):
    """A webhook that records its requests."""

    got: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        self.got.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_a_webhook_is_added_and_gets_a_test_event(site: Site, browser: Chromium, unique: str) -> None:
    name = unique.lower()
    endpoint = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    threading.Thread(target=endpoint.serve_forever).start()

    async def work(page: Page) -> None:
        await page.goto("/console/subscriptions")
        await page.get_by_role("button", name="Add a subscription").click()
        form = page.locator(".q-dialog .sheet")
        await form.get_by_label("Name").fill(name)
        await form.get_by_label("Topics").fill("udm:users/user")
        await form.get_by_label("Delivery").click()
        await page.get_by_role("option", name="Push").click()
        await form.get_by_label("Endpoint").fill(f"http://127.0.0.1:{endpoint.server_port}/in")
        await picture(page, "add-a-webhook")
        await form.get_by_role("button", name="Add", exact=True).click()
        shown = page.locator(".q-dialog .sheet", has_text="Shown only once")
        await expect(shown).to_contain_text("whsec_")
        await shown.get_by_role("button", name="I have it").click()
        await expect(page.get_by_role("heading", level=1)).to_have_text(name)
        await page.get_by_role("button", name="Send a test event").click()
        await expect(page.locator("[aria-label=Answers]")).to_contain_text("status 204")

    try:
        browser.visit(work)
    finally:
        endpoint.shutdown()
        endpoint.server_close()
    (got,) = Endpoint.got
    assert got["subscription"] == name
    assert got["message"]["attributes"]["purveyortest"] == "true"
    assert site.admin.get(f"/v1/subscriptions/{name}").json()["delivery"] == "push"


def test_the_instance_and_the_attempts_of_a_message_are_shown(site: Site, browser: Chromium, ox: str) -> None:
    with site.consumer(ox) as consumer:
        path = f"/v1/subscriptions/{ox}/messages"
        first = consumer.get(f"{path}/next?timeout=0", headers={"X-Consumer-Instance": "worker-7"}).json()
        again = {"status": "retry", "delay": 600}
        headers = {"X-Consumer-Instance": "worker-7"}
        answer = consumer.patch(f"{path}/{first['sequence_number']}/status", json=again, headers=headers)
        assert answer.status_code == 200, answer.text

    async def work(page: Page) -> None:
        await page.goto(f"/console/subscriptions/{ox}")
        line = page.locator("[aria-label='Next messages'] tbody tr").first
        await expect(line).to_contain_text("next attempt in")
        await expect(line.locator("[data-title=Attempts]")).to_have_text("1")
        await expect(line.locator("[data-title=Topic]")).to_have_text("udm:users/user")
        await expect(line.locator("[data-title=Key]")).to_have_text("u-1")
        await line.get_by_role("button").click()
        modal = page.locator(".q-dialog .sheet")
        await expect(modal.get_by_role("heading", name="Attempts that failed")).to_be_visible()
        failed = modal.locator("[aria-label=Attempts] tbody tr")
        await expect(failed).to_have_count(1)
        await expect(failed).to_contain_text("worker-7")

    browser.visit(work)


def test_what_an_endpoint_answered_to_each_attempt_is_shown_as_it_is(
    site: Site, browser: Chromium, unique: str
) -> None:
    name = unique.lower()
    push = {"endpoint": "https://example.com/in"}
    site.subscribe(name, delivery="push", push=push)
    fill(site.address, name, [1])

    async def note(queues: Queues) -> None:
        incarnation = (await Subscriptions(queues).get(name)).incarnation
        for attempt, status in ((1, 503), (2, 500)):
            outcome = Outcome(status=status, body=b"<i>busy</i>")
            entry = outcome.to_log_entry(datetime(2026, 11, 16, 12, attempt, tzinfo=UTC))
            await AttemptLog(queues).append(name, incarnation, 1, attempt, entry)

    site.on_server(note)

    async def work(page: Page) -> None:
        await page.goto(f"/console/subscriptions/{name}")
        await page.locator("[aria-label='Next messages'] tbody tr").first.get_by_role("button").click()
        failed = page.locator(".q-dialog .sheet [aria-label=Attempts] tbody tr")
        await expect(failed.locator("[data-title=Status]")).to_have_text(["503", "500"])
        await expect(failed.first).to_contain_text("<i>busy</i>")

    browser.visit(work)


def test_dead_letters_are_found_read_retried_and_discarded(site: Site, browser: Chromium, ox: str) -> None:
    dead_letters(site, ox, 3, "<b onmouseover=alert(1)>no such mailbox</b>")
    waiting = messages(site, ox)

    async def work(page: Page) -> None:
        await page.goto("/console/dead-letters")
        await page.get_by_label("Subscription").fill(ox)
        rows = page.locator("[aria-label='Dead letters'] tbody tr")
        await expect(rows).to_have_count(3)
        await expect(rows.first.locator("[data-title=Key]")).to_have_text(ox)
        await page.get_by_label("Reason contains").fill("no such thing")
        await expect(page.locator(".empty")).to_contain_text("No match")
        await page.get_by_label("Reason contains").fill("MAILBOX")
        await expect(rows).to_have_count(3)
        await picture(page, "dead-letters-filtered")
        await rows.first.get_by_role("button").click()
        modal = page.locator(".q-dialog .sheet")
        await expect(modal).to_contain_text("<b onmouseover=alert(1)>no such mailbox")
        await expect(modal).to_contain_text(f'"name": "{ox}"')
        await modal.get_by_role("button", name="Retry").click()
        await expect(rows).to_have_count(2)
        await page.locator("[data-act=pick-all]").check()
        await page.get_by_role("button", name="Discard picked").click()
        asked = page.locator(".q-dialog .sheet", has_text="Discard 2 dead letters?")
        await asked.get_by_role("button", name="Discard").click()
        await expect(page.locator(".empty")).to_contain_text("No match")

    browser.visit(work)
    assert messages(site, ox) == waiting + 1


def test_the_pipeline_page_shows_its_parts_their_errors_and_spark(site: Site, browser: Chromium) -> None:
    read_incoming(site)  # what other tests published is work for the parts

    async def work(page: Page) -> None:
        broken = part("transform", State.FAILED, error="the mapping is wrong")
        site.post(*all_parts(transform=broken), spark_ui="http://127.0.0.1:4040")
        await page.goto("/console/pipeline")
        table = page.locator("[aria-label=Parts]")
        dispatch = table.locator("tbody tr", has_text="dispatch")
        await expect(dispatch.locator(".badge")).to_contain_text("idle")  # then its last batch says nothing about now
        for title, text in {"Batch": "-", "Rows/s": "-", "Behind": "0", "Position": "12", "Batches": "3"}.items():
            await expect(dispatch.locator(f"[data-title='{title}']")).to_have_text(text)
        works = part("dispatch", position=20, lag=0, rows=4, rows_per_second=80, batch=4, batch_ms=64)
        site.post(*all_parts(transform=broken, dispatch=works), spark_ui="http://127.0.0.1:4040")
        await expect(dispatch.locator(".badge")).to_contain_text("running")
        for title, text in {"Batch": "64 ms", "Rows/s": "80", "Position": "20", "Batches": "4"}.items():
            await expect(dispatch.locator(f"[data-title='{title}']")).to_have_text(text)
        await expect(table).to_contain_text("the mapping is wrong")
        await expect(page.locator(".badge.stuck", has_text="failed")).to_be_visible()
        await expect(page.get_by_role("link", name="http://127.0.0.1:4040")).to_be_visible()
        await expect(page.locator("canvas")).to_have_count(2)
        site.post(*all_parts(archive=part("archive", State.UNRESPONSIVE, error="Spark does not answer")))
        await expect(page.locator(".badge.stuck", has_text="unresponsive")).to_be_visible()
        site.post(*all_parts())
        await expect(page.locator(".badge.stuck")).to_have_count(0)

    browser.visit(work)


def test_everything_can_be_reached_by_keys(site: Site, browser: Chromium) -> None:
    async def work(page: Page) -> None:
        await page.goto("/")
        await page.keyboard.press("Tab")
        await expect(page.get_by_text("To the content")).to_be_focused()
        await page.keyboard.press("g")
        await page.keyboard.press("s")
        await expect(page.get_by_role("heading", level=1)).to_have_text("Subscriptions")
        await expect(page.get_by_label("Filter subscriptions")).to_be_visible()
        await page.keyboard.press("/")
        await expect(page.get_by_label("Filter subscriptions")).to_be_focused()
        await page.keyboard.type("nobody has this name")
        await expect(page.locator(".empty")).to_contain_text("No subscription")
        await page.goto("/console/<b>nothing</b>")
        await expect(page.locator(".empty")).to_contain_text("There is no page /console/<b>nothing</b>")
        # What is focused stays so while the page goes on looking.
        await page.goto("/")
        link = page.locator("nav a", has_text="Queues")
        await link.focus()
        before = await page.locator("svg.flow").inner_html()
        fill(site.address, "incoming", [1], kind="x")
        await page.wait_for_function("before => document.querySelector('svg.flow').innerHTML !== before", arg=before)
        await expect(link).to_be_focused()
        await page.keyboard.press("t")
        assert await page.evaluate("document.documentElement.dataset.theme") == "dark"
        assert await page.evaluate("localStorage['purveyor-theme']") == "dark"  # the next page begins with it
        await page.evaluate("localStorage.clear()")

    browser.visit(work)


def test_every_page_is_readable_in_light_and_dark_and_on_a_phone(site: Site, browser: Chromium, ox: str) -> None:
    dead_letters(site, ox, 2, "the endpoint answered 503: try later")
    long_names = ("NameThatHasNoPlaceAtAllWhereItCouldBeBrokenIntoLinesByAnybodyWWW", "a-long-name-" * 5)
    for name in long_names:
        site.subscribe(name)
        fill(site.address, name, range(1, 41))

    async def work(page: Page) -> None:
        more = {"subscription-page": f"/console/subscriptions/{ox}", "queue": f"/console/queues?queue={ox}"}
        screens: dict[str, float] = {}
        for title, path in {**PAGES, **more}.items():
            site.post(*all_parts())
            await page.set_viewport_size({"width": 1280, "height": 900})
            await page.goto(path)
            await page.wait_for_selector("table.data td, .empty", state="attached")
            for theme, width in (("light", 1280), ("dark", 1280), ("light", 390)):
                await page.set_viewport_size({"width": width, "height": 900})
                await page.evaluate("theme => purveyor.wear(theme)", theme)
                assert await page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), (title, width)
                assert await page.evaluate(HARD_TO_READ) == [], (title, theme, width)
                assert await page.evaluate(BROKEN_NAMES) == [], (title, theme, width)
                await picture(page, f"{title}-{theme}-{width}")
            # A row is a card there, whose values say what they are; and every page can be reached.
            assert await page.evaluate(UNTOLD) == [], title
            assert await page.evaluate(TABS_OUT_OF_SIGHT) == [], title
            screens[title] = await page.evaluate("document.documentElement.scrollHeight") / 844
        await page.locator("nav a", has_text="Pipeline").click()
        await expect(page.get_by_role("heading", level=1)).to_have_text("Pipeline")
        assert max(screens.values()) < 4, screens

    try:
        browser.visit(work)
    finally:
        for name in long_names:
            site.admin.delete(f"/v1/subscriptions/{name}")


def test_a_plot_that_is_not_drawn_anew_yet_makes_no_page_wider(site: Site, browser: Chromium) -> None:
    """When a phone is turned, the plot keeps the old width for a moment."""

    async def work(page: Page) -> None:
        site.post(*all_parts())
        await page.set_viewport_size({"width": 390, "height": 900})
        await page.goto("/console/pipeline")
        await expect(page.locator("canvas")).to_have_count(2)
        await page.evaluate("document.querySelectorAll('.chart canvas').forEach(c => { c.style.width = '900px' })")
        await page.evaluate("document.querySelectorAll('.chart > div').forEach(c => { c.style.width = '900px' })")
        assert await page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")

    browser.visit(work)


def test_the_theme_follows_the_system(site: Site, browser: Chromium) -> None:
    async def work(page: Page) -> None:
        await page.emulate_media(color_scheme="dark")
        await page.goto("/console/login")
        assert await page.evaluate("document.documentElement.dataset.theme") == "dark"

    browser.visit(work, logged_in=False)


def test_the_api_had_nothing_to_complain_of(site: Site, browser: Chromium) -> None:
    assert "Traceback" not in site.errors()
