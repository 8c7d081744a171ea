"""The console needs the administrator's login; the API works as before."""

import base64
import stat
from pathlib import Path

import httpx
import pytest

from purveyor.app.console.console_login import COOKIE, Sessions, read_secret
from purveyor.app.http.authentication import Login, Role
from purveyor.model.errors import SetupError
from tests.support.console import ADMIN, Site

FORM = {"user": ADMIN[0], "password": ADMIN[1], "next": "/console/queues"}
ADMIN_LOGIN = Login(role=Role.ADMIN, username="admin", password="secret")


@pytest.mark.parametrize("path", ["/", "/console/queues", "/console/subscriptions/ox", "/console/nothing?a=b"])
def test_without_a_login_every_page_leads_to_it(site: Site, path: str) -> None:
    with site.client() as anybody:
        answer = anybody.get(path)
    assert answer.status_code == 303
    assert answer.headers["location"].startswith("/console/login?next=/")


def test_without_a_login_neither_scripts_nor_the_socket_are_served(site: Site) -> None:
    with site.client() as anybody:
        for path in ("/_nicegui/3.0/static/nicegui.js", "/_nicegui_ws/socket.io/?EIO=4&transport=polling"):
            assert anybody.get(path).status_code == 401
        upgrade = {
            "connection": "upgrade",
            "upgrade": "websocket",
            "sec-websocket-version": "13",
            "sec-websocket-key": base64.b64encode(bytes(16)).decode(),
        }
        socket = anybody.get("/_nicegui_ws/socket.io/?EIO=4&transport=websocket", headers=upgrade)
        assert socket.status_code == 403


def test_the_cookie_is_for_this_site_and_not_for_scripts(site: Site) -> None:
    with site.client() as anybody:
        answer = anybody.post("/console/login", data=FORM)
        assert (answer.status_code, answer.headers["location"]) == (303, "/console/queues")
        cookie = answer.headers["set-cookie"]
        assert all(word in cookie for word in (COOKIE, "HttpOnly", "SameSite=Strict", "Path=/"))
        assert anybody.get("/console/login").headers["location"] == "/"
        assert "content-security-policy" in answer.headers
        assert anybody.get("/console/logout").status_code == 303  # a link ends no session
        assert COOKIE in anybody.cookies
        anybody.post("/console/logout")
        assert COOKIE not in anybody.cookies


@pytest.mark.parametrize("wanted", ["//evil.example/", "https://evil.example/", "/\\evil.example", "/v1/subscriptions"])
def test_a_login_leads_nowhere_else(site: Site, wanted: str) -> None:
    with site.client() as anybody:
        assert anybody.post("/console/login", data={**FORM, "next": wanted}).headers["location"] == "/"


def test_another_site_cannot_send_the_form(site: Site) -> None:
    with site.client() as anybody:
        answer = anybody.post("/console/login", data=FORM, headers={"origin": "https://evil.example"})
        assert answer.status_code == 403
        assert anybody.post("/console/login", data=FORM, headers={"origin": site.url}).status_code == 303


@pytest.mark.parametrize(
    ("user", "password", "status"),
    [("admin", "wrong", 401), ("events", "events-secret", 403), ("", "", 401), ("admin", "x" * 9000, 401)],
)
def test_only_the_administrator_comes_in(site: Site, user: str, password: str, status: int) -> None:
    with site.client() as anybody:
        answer = anybody.post("/console/login", data={"user": user, "password": password})
        assert answer.status_code == status
        assert "set-cookie" not in answer.headers
        assert 'role="alert"' in answer.text
        assert password not in answer.text or not password


def test_guessing_passwords_is_throttled(site: Site) -> None:
    with site.client() as guesser:
        found = [
            guesser.post("/console/login", data={"user": "guessed", "password": str(number)}) for number in range(12)
        ]
    assert found[0].status_code == 401
    assert "www-authenticate" not in found[0].headers  # a browser would ask for a login by itself
    assert found[-1].status_code == 429
    assert f"in {found[-1].headers['retry-after']} seconds" in found[-1].text


def test_a_session_is_ours_and_ends_with_its_time_and_with_the_password() -> None:
    sessions = Sessions(b"s" * 32, ADMIN_LOGIN)
    value = sessions.cookie(secure=True).partition(";")[0]
    assert "Secure" in sessions.cookie(secure=True)
    assert sessions.read(f"other=1; {value}") is not None
    for wrong in (None, "", f"{COOKIE}=", f"{COOKIE}=1.2.3", value[:-2] + "xx", f"{COOKIE}=9{value.partition('=')[2]}"):
        assert sessions.read(wrong) is None
    renamed = Login(role=Role.ADMIN, username="admin", password="another")
    assert Sessions(b"s" * 32, renamed).read(value) is None
    assert Sessions(b"t" * 32, ADMIN_LOGIN).read(value) is None


def test_the_secret_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    first = read_secret(tmp_path / "data")
    assert read_secret(tmp_path / "data") == first
    file = tmp_path / "data" / "console.secret"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    with pytest.raises(SetupError, match="other users can read"):
        read_secret(tmp_path / "data")
    file.chmod(0o600)
    file.write_bytes(b"half")
    with pytest.raises(SetupError, match="is incomplete"):
        read_secret(tmp_path / "data")


def test_the_api_is_what_it_was(site: Site) -> None:
    with site.client() as anybody:
        assert anybody.get("/healthz").json() == {"status": "ok"}
        assert anybody.get("/v1/subscriptions").status_code == 401
        unknown = anybody.get("/consoles")
        assert (unknown.status_code, unknown.headers["content-type"]) == (401, "application/problem+json")
        described: httpx.Response = anybody.get("/openapi.json")
        assert not [path for path in described.json()["paths"] if "console" in path or "nicegui" in path or path == "/"]
