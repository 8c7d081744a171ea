"""`python -m benchmarks.push_endpoint PORT`: an aiohttp endpoint that only counts requests."""

import asyncio
import sys

import uvloop
from aiohttp import web

_SLOW_SECONDS = 0.05


class Endpoint:
    """`POST /in` answers 204 at once, `POST /slow` after 50 ms; `GET /` returns the number of requests."""

    def __init__(self) -> None:
        self.count = 0

    async def accept(self, request: web.Request) -> web.Response:
        await request.read()
        self.count += 1
        return web.Response(status=204)

    async def accept_slowly(self, request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(_SLOW_SECONDS)
        self.count += 1
        return web.Response(status=204)

    async def report_count(self, _: web.Request) -> web.Response:
        return web.Response(text=str(self.count))


async def main() -> None:
    endpoint = Endpoint()
    app = web.Application()
    app.add_routes(
        [
            web.post("/in", endpoint.accept),
            web.post("/slow", endpoint.accept_slowly),
            web.get("/", endpoint.report_count),
        ]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(sys.argv[1])).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main())
