"""Connections are verified, go to the checked address, are reused, and stay within the limit."""

import asyncio
import ssl
from pathlib import Path

import pytest

from purveyor.delivery.push.http_pool import HttpPool
from purveyor.delivery.push.settlement import Outcome
from purveyor.model.delivery_policy import Endpoint
from tests.support.certificates import self_signed
from tests.support.push import LOCAL, Site


async def post(pool: HttpPool, endpoint: Endpoint, seconds: float = 5) -> Outcome:
    head = f"POST {endpoint.path} HTTP/1.1\r\nhost: {endpoint.authority}\r\ncontent-length: 2\r\n\r\nhi"
    return await pool.host(endpoint).post(head.encode(), seconds)


async def test_over_tls_the_name_is_verified_though_the_address_is_connected_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = self_signed(tmp_path, "shop", "DNS:localhost")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"hi")
        writer.write(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        named, numbered = (Endpoint.parse(f"https://{host}:{port}/") for host in ("localhost", "127.0.0.1"))
        stranger = HttpPool(LOCAL)
        assert "TLS" in ((await post(stranger, numbered)).error or "")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        pool = HttpPool(LOCAL)
        monkeypatch.setattr("purveyor.delivery.push.egress_policy._literal", lambda _: LOCAL[0].network_address)
        assert (await post(pool, named)).status == 204
        refused = await post(pool, numbered)
        assert "TLS" in (refused.error or "")
        assert refused.sent
        for each in (stranger, pool):
            each.close()


async def test_a_connection_is_used_again_and_one_that_was_closed_meanwhile_is_replaced(site: Site) -> None:
    pool = HttpPool(LOCAL)
    endpoint = Endpoint.parse(site.url("/ok?for=sender"))
    for _ in range(3):
        assert (await post(pool, endpoint)).status == 204
    host = pool.host(endpoint)
    assert len(host._connections) == 1
    closing = Endpoint.parse(site.url("/drop?for=sender"))
    assert pool.host(closing) is host
    for _ in range(3):  # each time the connection that is kept is closed by the other side
        assert (await post(pool, closing)).status == 204
        assert (await post(pool, endpoint)).status == 204
    pool.close()


async def test_a_request_that_found_no_room_was_not_sent(site: Site) -> None:
    pool = HttpPool(LOCAL, per_host=1)
    slow = Endpoint.parse(site.url("/slow/4?for=crowd"))
    first, second = await asyncio.gather(post(pool, slow, 30), post(pool, slow, 0.1))
    assert first.status == 204
    assert (second.status, second.sent) == (None, False)
    pool.close()


async def test_a_host_that_does_not_answer_is_described_in_the_outcome() -> None:
    pool = HttpPool(LOCAL)
    for url, word in (("http://127.0.0.1:9/", "no connection"), ("http://no-such-name.invalid/", "cannot be resolved")):
        outcome = await post(pool, Endpoint.parse(url))
        assert word in (outcome.error or "")
        assert outcome.sent
    pool.close()


async def test_each_request_of_a_reused_connection_has_its_own_deadline(site: Site) -> None:
    """One timer serves all requests of a connection."""
    pool = HttpPool(LOCAL, per_host=1)
    fast, slow = (Endpoint.parse(site.url(f"{path}?for=deadline")) for path in ("/ok", "/slow/3.5"))
    assert (await post(pool, fast, 3)).status == 204
    assert (await post(pool, slow, 30)).status == 204  # the timer of the first request fires during the second
    assert len(pool.host(fast)._connections) == 1
    late = await post(pool, slow, 0.3)  # earlier than the timer that is set
    assert late.error == "no answer within 0.3 s"
    assert late.sent
    pool.close()


async def test_a_cancelled_request_closes_its_connection_and_frees_its_place(site: Site) -> None:
    pool = HttpPool(LOCAL, per_host=1)
    slow, fast = (Endpoint.parse(site.url(f"{path}?for=cancelled")) for path in ("/slow/30", "/ok"))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(post(pool, slow, 60), 0.3)
    assert (await post(pool, fast, 30)).status == 204
    pool.close()
