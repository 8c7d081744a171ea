"""The schemas, as `purveyor schema` reads and changes them. A schema has the form of `SchemaBody` of the HTTP API."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from purveyor.app.cli.backends.api_access import ApiRoutes, part
from purveyor.app.json_views import check_object, schema_json
from purveyor.app.settings import Settings
from purveyor.model.errors import NotFound, UnknownSchema
from purveyor.model.json_fields import Json
from purveyor.model.subscription import RealmTopic
from purveyor.queues.client import Queues
from purveyor.sources.schemas.registry import NewSchema, SchemaRegistry, find_revision_problems
from purveyor.sources.schemas.schema import Compatibility


@dataclass(frozen=True, slots=True)
class SchemaList:
    """The schemas, sorted by name, and the reasons why some entries of the registry cannot be read."""

    schemas: list[Json]
    unreadable: dict[str, str] = field(default_factory=dict)


class Schemas(Protocol):
    """The schemas of a deployment."""

    async def list_schemas(self) -> SchemaList:
        """Return all schemas."""
        ...

    async def get(self, name: str) -> Json:
        """Return a schema; raise UnknownSchema if there is none."""
        ...

    async def revisions(self, name: str) -> list[Json]:
        """Return the revisions of a schema, the oldest first."""
        ...

    async def add(self, new: NewSchema) -> Json:
        """Add a schema."""
        ...

    async def change(
        self, name: str, compatibility: Compatibility | None, topics: tuple[RealmTopic, ...] | None
    ) -> Json:
        """Change the compatibility or the topics."""
        ...

    async def commit(self, name: str, definition: Json) -> Json:
        """Put a definition in force as the next revision, unless it is in force."""
        ...

    async def roll_back(self, name: str, revision: int) -> Json:
        """Put an earlier revision in force again."""
        ...

    async def check_definition(self, name: str, definition: Json) -> list[str]:
        """Return why a definition cannot be the next revision."""
        ...

    async def check_object(self, name: str, given: object) -> list[str]:
        """Return why an object does not fit. A text is Avro binary in base64."""
        ...

    async def delete(self, name: str, revision: int | None) -> None:
        """Delete a schema, or one revision that is not in force."""
        ...


@dataclass(frozen=True, slots=True)
class DirectSchemas:
    """The schemas in the registry on the NATS server."""

    registry: SchemaRegistry

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, queues: Queues, settings: Settings) -> "AsyncIterator[Schemas]":
        """Open the registry."""
        yield cls(SchemaRegistry(queues, replicas=settings.replicas))

    async def list_schemas(self) -> SchemaList:
        """Return all schemas."""
        found = await self.registry.list()
        return SchemaList([schema_json(found.schemas[name]) for name in sorted(found.schemas)], found.unreadable)

    async def get(self, name: str) -> Json:
        """Return a schema."""
        return schema_json(await self.registry.get(name))

    async def revisions(self, name: str) -> list[Json]:
        """Return the revisions of a schema."""
        return [each.to_json() for each in (await self.registry.get(name)).revisions]

    async def add(self, new: NewSchema) -> Json:
        """Add a schema."""
        return schema_json((await self.registry.add(new))[0])

    async def change(
        self, name: str, compatibility: Compatibility | None, topics: tuple[RealmTopic, ...] | None
    ) -> Json:
        """Change the compatibility or the topics."""
        return schema_json(await self.registry.change(name, compatibility=compatibility, topics=topics))

    async def commit(self, name: str, definition: Json) -> Json:
        """Put a definition in force."""
        return schema_json((await self.registry.commit(name, definition))[0])

    async def roll_back(self, name: str, revision: int) -> Json:
        """Put an earlier revision in force again."""
        return schema_json(await self.registry.roll_back(name, revision))

    async def check_definition(self, name: str, definition: Json) -> list[str]:
        """Return why a definition cannot be the next revision."""
        return [*find_revision_problems(await self.registry.get(name), definition)]

    async def check_object(self, name: str, given: object) -> list[str]:
        """Return why an object does not fit."""
        return check_object(await self.registry.get(name), given)

    async def delete(self, name: str, revision: int | None) -> None:
        """Delete a schema or a revision."""
        if revision is None:
            await self.registry.delete(name)
        else:
            await self.registry.delete_revision(name, revision)


@dataclass(frozen=True, slots=True)
class RemoteSchemas:
    """The schemas over the HTTP API."""

    routes: ApiRoutes

    async def list_schemas(self) -> SchemaList:
        """Return all schemas."""
        return SchemaList((await self.routes.request("GET", "schemas")).body)

    async def get(self, name: str) -> Json:
        """Return a schema."""
        try:
            found: Json = (await self.routes.request("GET", "schemas", part(name))).body
        except NotFound as error:
            raise UnknownSchema(error.message, fix=error.fix) from error
        return found

    async def revisions(self, name: str) -> list[Json]:
        """Return the revisions of a schema."""
        found: list[Json] = (await self.routes.request("GET", "schemas", part(name), "revisions")).body
        return found

    async def add(self, new: NewSchema) -> Json:
        """Add a schema."""
        body = {
            "name": new.name,
            "type": new.type.value,
            "encoding": new.encoding.value,
            "compatibility": new.compatibility.value,
            "realms_topics": [each.to_json() for each in new.realms_topics],
            "definition": new.definition,
        }
        return await self._post((), body)

    async def change(
        self, name: str, compatibility: Compatibility | None, topics: tuple[RealmTopic, ...] | None
    ) -> Json:
        """Change the compatibility or the topics."""
        body: Json = {} if compatibility is None else {"compatibility": compatibility.value}
        if topics is not None:
            body["realms_topics"] = [each.to_json() for each in topics]
        found: Json = (await self.routes.request("PATCH", "schemas", part(name), body=body)).body
        return found

    async def commit(self, name: str, definition: Json) -> Json:
        """Put a definition in force."""
        return await self._post((part(name), "revisions"), {"definition": definition})

    async def roll_back(self, name: str, revision: int) -> Json:
        """Put an earlier revision in force again."""
        return await self._post((part(name), "rollback"), {"revision": revision})

    async def check_definition(self, name: str, definition: Json) -> list[str]:
        """Return why a definition cannot be the next revision."""
        return [*(await self._post((part(name), "check"), {"definition": definition}))["problems"]]

    async def check_object(self, name: str, given: object) -> list[str]:
        """Return why an object does not fit."""
        return [*(await self._post((part(name), "check"), {"object": given}))["problems"]]

    async def delete(self, name: str, revision: int | None) -> None:
        """Delete a schema or a revision."""
        inner = () if revision is None else ("revisions", str(revision))
        await self.routes.request("DELETE", "schemas", part(name), *inner)

    async def _post(self, path: tuple[str, ...], body: Json) -> Json:
        found: Json = (await self.routes.request("POST", "schemas", *path, body=body)).body
        return found
