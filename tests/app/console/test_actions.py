"""The console's actions in a real browser: add and edit with every option, passwords, events, copying, attempts."""

import json
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

from playwright.async_api import Locator, Page, expect

from purveyor.model.control_events import Job, ReplayJob, decode_job
from purveyor.queues.catalogue import PREFILL
from purveyor.queues.client import Queues
from tests.app.console.server_data import messages
from tests.support.command_line import PROGRAM, SOURCE, url_of
from tests.support.console import Chromium, Site, picture
from tests.support.running_api import begin_replay, fill
from tests.support.waiting import PATIENCE_SECONDS, wait_until


async def choose(form: Locator, label: str, option: str) -> None:
    await form.get_by_label(label, exact=True).click()
    await form.page.get_by_role("option", name=option).click()


def error_of(form: Locator, label: str, text: str) -> Locator:
    """Return the error with this text that stands at a field. While it replaces another one, both stand there."""
    field = form.locator(".q-field", has=form.page.get_by_label(label, exact=True))
    return field.locator(".q-field__messages [role=alert]", has_text=text)


async def copied(page: Page, button: Locator) -> str:
    await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await button.click()
    await expect(button).to_have_text("Copied")
    return str(await page.evaluate("navigator.clipboard.readText()"))


def test_a_subscription_is_added_with_every_option_and_each_mistake_stands_at_its_field(  # noqa: PLR0915 - as below
    site: Site, browser: Chromium, unique: str
) -> None:
    name = unique.lower()

    async def work(page: Page) -> None:  # noqa: PLR0915 - one form with many fields
        await page.goto("/console/subscriptions")
        await page.get_by_role("button", name="Add a subscription").click()
        form = page.locator(".q-dialog .sheet")
        await form.get_by_label("Name", exact=True).fill("no name!")
        await form.get_by_label("Topics", exact=True).fill("udm:users/user, shop:orders/.*")
        await choose(form, "Delivery", "Push")
        await form.get_by_label("Endpoint", exact=True).fill("https://user@shop.example/in")
        await form.get_by_label("Deadline of an answer").fill("soon")
        await form.get_by_text("Lease, retries, retention").click()
        await form.get_by_label("Attempts", exact=True).fill("-1")
        await form.get_by_label("Only objects with fields").fill("department")
        add = form.get_by_role("button", name="Add", exact=True)
        await add.click()
        await expect(error_of(form, "Topics", "each on a line of its own")).to_be_visible()
        await expect(error_of(form, "Deadline of an answer", "invalid duration")).to_be_visible()
        await expect(error_of(form, "Attempts", "is not a number")).to_be_visible()
        await expect(error_of(form, "Only objects with fields", "NAME=VALUE")).to_be_visible()
        await picture(page, "form-with-errors")
        await form.get_by_label("Topics", exact=True).fill("udm:users/user\nshop:orders/[a-z,]{1,3}")
        await form.get_by_label("Deadline of an answer").fill("20s")
        await form.get_by_label("Attempts", exact=True).fill("7")
        await form.get_by_label("First delay").fill("1h")
        await form.get_by_label("Longest delay").fill("1m")
        await form.get_by_label("Only objects with fields").fill("password=x\nlevel=3\nlevel=4")
        await add.click()
        await expect(error_of(form, "Name", "name")).to_be_visible()
        await expect(error_of(form, "Endpoint", "bearer_token")).to_be_visible()
        await expect(error_of(form, "First delay", "a backoff from 3600 to 60 seconds")).to_be_visible()
        await expect(error_of(form, "Only objects with fields", "reveal the hidden field")).to_be_visible()
        await expect(error_of(form, "Topics", "")).to_have_count(0)
        await form.get_by_label("Name", exact=True).fill("admin")
        await form.get_by_label("Endpoint", exact=True).fill("https://a.example/in\nhttps://b.example/in")
        await form.get_by_label("First delay").fill("2s")
        await form.get_by_label("Only objects with fields").fill("level=3\nlevel=4\ndepartment=it")
        await form.get_by_label("Only events with attributes").fill("tenant=3")
        await form.get_by_label("Lease", exact=True).fill("1m")
        await form.get_by_label("Retention", exact=True).fill("7d")
        await choose(form, "Order that it keeps", "By key")
        await choose(form, "Format", "CloudEvents")
        await choose(form, "Statuses that acknowledge", "all of 2xx")
        await choose(form, "After a dead letter", "Park later messages")
        await choose(form, "Bearer token", "This token")
        await form.get_by_label("Token", exact=True).fill("the-token")
        await choose(form, "Hidden fields", "These fields")
        await form.get_by_label("Fields to hide").fill("password\nsalary")
        await add.click()
        await expect(error_of(form, "Name", "a login of the settings")).to_be_visible()
        await form.get_by_label("Name", exact=True).fill(name)
        await picture(page, "form-push")
        await add.click()
        shown = page.locator(".q-dialog .sheet", has_text="Shown only once")
        await expect(shown).to_contain_text("whsec_")
        await picture(page, "shown-once")
        password = await copied(page, shown.get_by_role("button", name="Copy the password"))
        with site.client(name, password) as consumer:
            assert consumer.get(f"/v1/subscriptions/{name}").status_code == 200
        await shown.get_by_role("button", name="I have it").click()
        await expect(page.get_by_role("heading", level=1)).to_have_text(name)

    browser.visit(work)
    found = site.admin.get(f"/v1/subscriptions/{name}").json()
    assert found["realms_topics"] == [
        {"realm": "udm", "topic": "users/user"},
        {"realm": "shop", "topic": "orders/[a-z,]{1,3}"},
    ]
    assert {field: found[field] for field in ("delivery", "order_by", "lease_seconds", "retention_seconds")} == {
        "delivery": "push",
        "order_by": "key",
        "lease_seconds": 60.0,
        "retention_seconds": 7 * 86400.0,
    }
    assert found["retry"] == {"max_attempts": 7, "min_backoff_seconds": 2.0, "max_backoff_seconds": 60.0}
    assert found["filter"] == {"attributes": {"tenant": ["3"]}, "fields": {"level": [3, 4], "department": ["it"]}}
    assert found["hidden_fields"] == ["password", "salary"]
    assert found["push"] == {
        "endpoints": ["https://a.example/in", "https://b.example/in"],
        "ack_deadline_seconds": 20.0,
        "format": "cloudevents",
        "ack_codes": "2xx",
        "after_dead_letter": "park_key",
        "secret": "***",
        "bearer_token": "***",
    }
    site.admin.delete(f"/v1/subscriptions/{name}")


def test_a_subscription_is_edited_and_only_what_changed_is_sent(site: Site, browser: Chromium, ox: str) -> None:
    before = site.admin.get(f"/v1/subscriptions/{ox}").json()

    async def work(page: Page) -> None:
        await page.goto(f"/console/subscriptions/{ox}")
        edit = page.get_by_role("button", name="Edit …")
        form = page.locator(".q-dialog .sheet")
        await edit.click()
        await form.get_by_role("button", name="Save").click()
        await expect(page.get_by_text("Nothing was changed")).to_be_visible()
        assert site.admin.get(f"/v1/subscriptions/{ox}").json() == before
        await expect(form).to_have_count(0)
        await edit.click()
        await choose(form, "Delivery", "Fetched by many")
        await form.get_by_text("Lease, retries, retention").click()
        await form.get_by_label("Lease", exact=True).fill("1d")
        await form.get_by_role("button", name="Save").click()
        await expect(error_of(form, "Lease", "less than or equal to 43200")).to_be_visible()
        await form.get_by_label("Lease", exact=True).fill("45s")
        # Another administrator changes another option meanwhile.
        assert site.admin.patch(f"/v1/subscriptions/{ox}", json={"retention_seconds": 3600}).status_code == 200
        await form.get_by_role("button", name="Save").click()
        await expect(page.get_by_text(f"{ox} is changed")).to_be_visible()
        await expect(page.locator("dd", has_text="45 s")).to_be_visible()
        changed = site.admin.get(f"/v1/subscriptions/{ox}").json()
        more = {"delivery": "parallel", "lease_seconds": 45.0, "retention_seconds": 3600.0}
        assert changed == {**before, **more}
        await edit.click()
        await choose(form, "Delivery", "Push")
        await form.get_by_label("Endpoint", exact=True).fill("ftp://shop.example/in")
        await form.get_by_role("button", name="Save").click()
        await expect(error_of(form, "Endpoint", "https")).to_be_visible()
        await form.get_by_label("Endpoint", exact=True).fill("https://shop.example/in")
        await form.get_by_role("button", name="Save").click()
        await (
            page.locator(".q-dialog .sheet", has_text="Shown only once").get_by_role("button", name="I have it").click()
        )
        await edit.click()
        await form.get_by_label("Endpoint", exact=True).fill("https://other.example/in")
        await form.get_by_role("button", name="Save").click()
        await expect(error_of(form, "Endpoint", "secret would be sent there")).to_be_visible()
        await choose(form, "Signature", "Not signed")
        await form.get_by_label("Topics", exact=True).fill("udm:[")
        await form.get_by_role("button", name="Save").click()
        await expect(error_of(form, "Topics", "[")).to_be_visible()
        await form.get_by_label("Topics", exact=True).fill("udm:users/user\nshop:orders/[a-z]{1,3}")
        await form.get_by_text("Prefill of new topics").click()
        await form.get_by_role("button", name="Save").click()
        await expect(form).to_have_count(0)

    browser.visit(work)
    changed = site.admin.get(f"/v1/subscriptions/{ox}").json()
    assert changed["push"] == {"endpoint": "https://other.example/in"}
    assert {"realm": "shop", "topic": "orders/[a-z]{1,3}"} in changed["realms_topics"]
    assert changed["in_force_after"] > 0


def test_a_password_is_set_an_event_is_published_and_texts_are_copied(site: Site, browser: Chromium, ox: str) -> None:
    async def work(page: Page) -> None:
        await page.goto(f"/console/subscriptions/{ox}")
        await page.get_by_role("button", name="New password …").click()
        form = page.locator(".q-dialog .sheet")
        await form.get_by_label("The old password stays valid for").fill("a while")
        await form.get_by_role("button", name="Set the password").click()
        await expect(error_of(form, "The old password stays valid for", "invalid duration")).to_be_visible()
        await form.get_by_label("The old password stays valid for").fill("1h")
        await form.get_by_role("button", name="Set the password").click()
        shown = page.locator(".q-dialog .sheet", has_text="Shown only once")
        password = await copied(page, shown.get_by_role("button", name="Copy the password"))
        await shown.get_by_role("button", name="I have it").click()
        for valid in (site.consumer(ox), site.client(ox, password)):
            with valid:
                assert valid.get(f"/v1/subscriptions/{ox}").status_code == 200
        assert await copied(page, page.get_by_role("button", name="Copy the name")) == ox
        url = f"{site.url}/v1/subscriptions/{ox}"
        assert await copied(page, page.get_by_role("button", name="Copy the URL")) == url
        curl = f"curl -u {ox}:PASSWORD '{url}/messages/next?timeout=5'"
        assert await copied(page, page.get_by_role("button", name="Copy the curl line")) == curl

        await page.get_by_role("button", name="Publish an event …").click()
        await expect(form.get_by_label("Realm")).to_have_value("udm")
        await expect(form.get_by_label("Topic")).to_have_value("users/user")
        await form.get_by_label("Realm").fill("")
        await form.get_by_label("Key").fill("k" * 1100)
        await form.get_by_label("Body").fill("{")
        await form.get_by_label("Attributes").fill("tenant")
        publish = form.get_by_role("button", name="Publish")
        await publish.click()
        await expect(error_of(form, "Body", "not JSON")).to_be_visible()
        await expect(error_of(form, "Attributes", "NAME=VALUE")).to_be_visible()
        await form.get_by_label("Body").fill('{"old": {}, "new": {}}')
        await form.get_by_label("Attributes").fill("tenant=north")
        await publish.click()
        await expect(error_of(form, "Body", "neither an old nor a new object")).to_be_visible()
        await expect(error_of(form, "Realm", "empty")).to_be_visible()
        await expect(error_of(form, "Key", "1024")).to_be_visible()
        await picture(page, "publish-errors")
        await form.get_by_label("Realm").fill("udm")
        await form.get_by_label("Key").fill("ada")
        await form.get_by_label("Body").fill('{"new": {"name": "Ada"}}')
        await publish.click()
        await expect(form.locator(".form-done")).to_contain_text("Stored at position")
        position = await copied(page, form.get_by_role("button", name="Copy the position"))
        assert position.isdecimal()
        event = json.loads(await copied(page, form.get_by_role("button", name="Copy the event", exact=True)))
        assert (event["key"], event["attributes"], event["body"]["new"]) == (
            "ada",
            {"tenant": "north"},
            {"name": "Ada"},
        )
        await picture(page, "published")

    stored = messages(site, "incoming")
    browser.visit(work)
    assert messages(site, "incoming") == stored + 1


class Endpoint(BaseHTTPRequestHandler):
    """An endpoint that refuses every event of some keys."""

    refused: ClassVar[set[str]] = set()

    def do_POST(self) -> None:
        event = json.loads(self.rfile.read(int(self.headers["content-length"])))
        is_refused = event["body"]["new"]["uuid"] in self.refused
        answer = b"<i>try later</i>" if is_refused else b'{"queued": true}'
        self.send_response(503 if is_refused else 200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def pushing(site: Site) -> Iterator[str]:
    """Run a push worker and an endpoint; yield its URL."""
    endpoint = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    thread = threading.Thread(target=endpoint.serve_forever)
    thread.start()
    settings = {
        "PYTHONPATH": str(SOURCE),
        "PURVEYOR_DATA_DIR": str(site.data_dir),
        "PURVEYOR_NATS_URL": url_of(site.address),
        "PURVEYOR_PUSH_ALLOW": "127.0.0.0/8",
    }
    worker = subprocess.Popen([*PROGRAM, "serve", "push", "--json"], env=settings, stdout=subprocess.PIPE, text=True)
    try:
        assert worker.stdout is not None
        assert json.loads(worker.stdout.readline())["event"] == "ready"
        yield f"http://127.0.0.1:{endpoint.server_port}/in"
    finally:
        worker.terminate()
        worker.communicate(timeout=PATIENCE_SECONDS)
        endpoint.shutdown()
        endpoint.server_close()
        thread.join()


def test_attempts_are_found_by_key_and_time_and_a_message_is_sent_again(  # noqa: PLR0915 - one scenario
    site: Site, browser: Chromium, unique: str
) -> None:
    name, jobs = unique.lower(), messages(site, PREFILL.name)
    path = f"/v1/subscriptions/{name}/attempts"

    def logged(**query: Any) -> int:
        return len(site.admin.get(path, params={**query, "limit": 1000}).json()["attempts"])

    async def work(page: Page) -> None:
        await page.goto(f"/console/subscriptions/{name}")
        rows = page.locator("section", has_text="The last attempts").locator("tbody tr")
        await expect(rows).to_have_count(15)
        await page.get_by_role("button", name="Older").click()
        await expect(rows).to_have_count(6)
        await page.get_by_role("button", name="Newer").click()
        await picture(page, "attempts")
        await page.get_by_label("Key contains").fill("U-3")
        await expect(rows).to_have_count(1)
        await expect(rows.first).to_contain_text("503")
        await expect(rows.first).to_contain_text("<i>try later</i>")
        await expect(rows.first.locator("[data-title=Duration]")).to_have_text(re.compile(r"^[\d,.]+ ms$"))
        await page.get_by_label("From", exact=True).fill("last week")
        await expect(page.get_by_text("is not a time")).to_be_visible()
        await page.get_by_label("From", exact=True).fill("1h")
        await expect(rows).to_have_count(1)
        await page.get_by_label("To", exact=True).fill("30m")
        await expect(page.locator(".empty", has_text="No match")).to_be_visible()
        await page.get_by_label("To", exact=True).fill("")
        await page.get_by_label("Key contains").fill("")
        await page.get_by_label("Outcome").click()
        await page.get_by_role("option", name="Failed").click()
        await expect(rows).to_have_count(1)
        await rows.first.get_by_role("button").click()
        shown = page.locator(".q-dialog .sheet")
        await expect(shown).to_contain_text("sent again later")
        await expect(shown).to_contain_text('"uuid": "u-3"')
        assert await copied(page, shown.get_by_role("button", name="Copy the position")) == "3"
        assert (
            json.loads(await copied(page, shown.get_by_role("button", name="Copy the event", exact=True)))["topic"]
            == "users/user"
        )
        await picture(page, "attempt")
        Endpoint.refused.clear()
        await shown.get_by_role("button", name="Retry now").click()
        await expect(shown).to_have_count(0)
        wait_until(lambda: logged(key="u-3") == 2)
        await page.get_by_label("Outcome").click()
        await page.get_by_role("option", name="All attempts").click()
        await page.get_by_label("Key contains").fill("u-3")
        await expect(rows).to_have_count(2)
        await expect(rows.first).to_contain_text("200")
        await rows.last.get_by_role("button").click()
        await expect(shown.get_by_role("button", name="Retry now")).to_have_count(0)
        await shown.get_by_role("button", name="Replay from here").click()
        await expect(page.get_by_text("The replay is requested")).to_be_visible()

    async def replay_one(page: Page) -> None:
        await page.goto(f"/console/subscriptions/{name}")
        await page.get_by_label("Key contains").fill("u-7")
        rows = page.locator("section", has_text="The last attempts").locator("tbody tr")
        await expect(rows).to_have_count(1)
        await rows.first.get_by_role("button").click()
        await page.locator(".q-dialog .sheet").get_by_role("button", name="Replay this event").click()
        await expect(page.get_by_text("The replay is requested")).to_be_visible()

    async def newest_job(queues: Queues) -> Job:
        last = (await queues.streams.info(PREFILL.stream)).state.last_seq
        return decode_job((await queues.streams.get(PREFILL.stream, last)).data)

    Endpoint.refused.add("u-3")
    with pushing(site) as url:
        retry = {"min_backoff_seconds": 3600, "max_backoff_seconds": 3600}
        site.subscribe(name, delivery="push", retry=retry, push={"endpoint": url, "format": "raw"})
        fill(site.address, "incoming", range(1, 8), kind="x")  # a replay begins at a position that exists
        fill(site.address, name, range(1, 22))
        wait_until(lambda: logged() == 21)
        browser.visit(work)
        job = site.on_server(newest_job)
        assert isinstance(job, ReplayJob)
        assert (job.name, job.from_, job.to) == (name, 3, None)
        begin_replay(site.address, name, job.job)
        browser.visit(replay_one)
        job = site.on_server(newest_job)
        assert isinstance(job, ReplayJob)
        assert (job.name, job.from_, job.to) == (name, 7, 7)
        site.admin.delete(f"/v1/subscriptions/{name}")
    assert messages(site, PREFILL.name) == jobs + 2


def test_a_subscription_with_an_endpoint_that_refuses_is_not_shown_as_active(
    site: Site, browser: Chromium, unique: str
) -> None:
    name = unique.lower()

    async def work(page: Page) -> None:
        await page.goto("/console/subscriptions")
        await page.get_by_placeholder("Filter subscriptions").fill(name)
        row = page.locator("tbody tr", has_text=name)
        await expect(row.locator(".badge")).to_contain_text("not pushed")
        await page.goto(f"/console/subscriptions/{name}")
        await expect(page.locator(".alert")).to_contain_text("answers 503")
        state = page.locator("section", has_text="Definition").locator("dl > div", has_text="State")
        await expect(state).to_contain_text("not pushed")
        await expect(state).not_to_contain_text("active")

    Endpoint.refused.add("u-1")
    with pushing(site) as url:
        site.subscribe(name, delivery="push", push={"endpoint": url, "format": "raw"})
        fill(site.address, name, [1])
        browser.visit(work)
        Endpoint.refused.clear()
        site.admin.delete(f"/v1/subscriptions/{name}")
