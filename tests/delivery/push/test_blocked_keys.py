"""Keys that are parked are kept by their marks: long ones take no more room, and what an older version noted counts."""

import contextlib
import json

import pytest

from purveyor.delivery.push.push_leases import BlockedKeys
from purveyor.delivery.push.push_reports import attempts_bucket
from purveyor.jetstream.server import ServerOptions
from purveyor.model.errors import Refused
from purveyor.queues.catalogue import DEAD_LETTERS
from purveyor.queues.client import connect
from tests.support.nats_servers import OwnServer

LONG = "k" * 5000


async def test_full_keys_of_an_older_version_are_found_and_long_keys_take_little_space(own_server: OwnServer) -> None:
    async with connect(own_server().address) as queues:
        bucket = await queues.bucket(attempts_bucket(1))
        old = {"incarnation": "i", "keys": {LONG: [3], "short": [4]}}
        await bucket.put("ox.parked", json.dumps(old).encode())
        keys = BlockedKeys(queues)
        await keys.block("ox", "i", LONG, 5)
        await keys.block("ox", "i", "short", 6)
        assert sorted((await keys.read("ox", "i")).values()) == [[3, 5], [4, 6]]
        assert len((await bucket.get("ox.parked")).value) < 200
        assert not await keys.read("ox", "another")


async def test_without_space_for_another_key_resolved_keys_are_unblocked_or_the_key_is_refused(
    own_server: OwnServer,
) -> None:
    server = own_server(ServerOptions(max_payload=8 << 10, sync="2m"))
    async with connect(server.address) as queues:
        (await queues.ensure(DEAD_LETTERS)).require_usable()
        keys = BlockedKeys(queues)
        letters = 0
        with contextlib.suppress(Refused):
            while True:
                await keys.make_space("ox", "i")
                letters = (await queues.publish("dead-letters.x", b"")).sequence
                await keys.block("ox", "i", f"{letters}-{LONG}", letters)
        assert letters > 50
        with pytest.raises(Refused, match=f"{letters} keys of subscription 'ox' are blocked"):
            await keys.make_space("ox", "i")
        await queues.streams.delete_message(DEAD_LETTERS.stream, 7)
        await keys.make_space("ox", "i")
        assert len(await keys.read("ox", "i")) == letters - 1
