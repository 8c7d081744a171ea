"""The registry of schemas: concurrent commits all take effect, and the cache gets changes after an outage."""

import asyncio
import dataclasses
from typing import Any

import pytest

from purveyor.jetstream.address import Address
from purveyor.model.errors import InvalidInput, SchemaMismatch, Unavailable
from purveyor.model.subscription import RealmTopic
from purveyor.queues.client import connect
from purveyor.sources.schemas.registry import NewSchema, SchemaCache, SchemaRegistry
from purveyor.sources.schemas.schema import Compatibility, SchemaType, Topic
from tests.support.proxy import TcpProxy
from tests.support.waiting import until


def new(name: str, definition: dict[str, Any]) -> NewSchema:
    return NewSchema(
        name=name,
        type=SchemaType.JSON_SCHEMA,
        definition=definition,
        realms_topics=(RealmTopic(name, "t"),),
        compatibility=Compatibility.NONE,
    )


def fits(schema_cache: SchemaCache, realm: str, given: dict[str, Any]) -> bool:
    about = {"publisher_name": "p", "ts": "2026-01-01T00:00:00Z", "realm": realm, "topic": "t"}
    try:
        schema_cache.validator.read({**about, "body": {"new": given}})
    except SchemaMismatch:
        return False
    return True


async def test_commits_of_many_at_once_are_one_after_the_other(address: Address, unique: str) -> None:
    async with connect(address) as one, connect(address) as other:
        await SchemaRegistry(one).add(new(unique, {}))

        async def commit(schemas: SchemaRegistry, who: int) -> None:
            for number in range(4):
                await schemas.commit(unique, {"title": f"{who}-{number}"})

        await asyncio.gather(*(commit(SchemaRegistry(queues), who) for who, queues in enumerate((one, other, other))))
        revisions = (await SchemaRegistry(one).get(unique)).revisions
    assert [each.number for each in revisions] == list(range(1, 14))
    titles = [each.definition["title"] for each in revisions[1:]]
    assert len(set(titles)) == 12
    assert [title for title in titles if title.startswith("1-")] == [f"1-{number}" for number in range(4)]


async def test_changes_during_an_outage_take_effect_after_it(
    address: Address, tcp_proxy: TcpProxy, unique: str
) -> None:
    async with connect(tcp_proxy.address(address), patience_seconds=30) as away, connect(address) as here:
        schema_cache, schemas = SchemaCache(away), SchemaRegistry(here)
        with pytest.raises(Unavailable, match="not read yet"):
            fits(schema_cache, unique, {"a": 1})
        async with schema_cache.following():
            assert fits(schema_cache, unique, {"a": 1})
            await schemas.add(new(unique, {"required": ["b"]}))
            await until(lambda: not fits(schema_cache, unique, {"a": 1}))
            tcp_proxy.refuse()
            await schemas.commit(unique, {"required": ["a"]})
            await (await schemas.bucket()).put(f"schema.{unique}-rubbish", b"\xff")
            tcp_proxy.restore()
            await until(lambda: fits(schema_cache, unique, {"a": 1}))
            assert not fits(schema_cache, unique, {"b": 1})
            assert f"schema.{unique}-rubbish" in (await schemas.list()).unreadable
            await (await schemas.bucket()).delete(f"schema.{unique}-rubbish")


async def test_a_schema_has_a_size_limit(address: Address, unique: str) -> None:
    async with connect(address) as queues:
        schemas = SchemaRegistry(queues)
        with pytest.raises(InvalidInput, match="bytes"):
            await schemas.add(new(unique, {"title": "x" * (128 << 10)}))
        await schemas.add(new(unique, {}))
        for number in range(4):
            await schemas.commit(unique, {"title": f"{number}" * (120 << 10)})
        with pytest.raises(InvalidInput, match="revisions of"):
            await schemas.commit(unique, {"title": "x" * (120 << 10)})
        assert (await schemas.get(unique)).newest.number == 5


async def test_a_topic_that_was_seen_keeps_its_beginning_when_it_is_declared(address: Address, unique: str) -> None:
    async with connect(address) as queues:
        schemas = SchemaRegistry(queues)
        await schemas.add_seen_topics([(unique, "t"), (unique, "t")])
        seen = await schemas.topic(unique, "t")
        declared = dataclasses.replace(seen, since=seen.since.replace(year=2000), declared=True)
        assert await schemas.declare(declared) == (dataclasses.replace(seen, declared=True), True)
        assert Topic.from_json(seen.to_json()) == seen
