"""`purveyor schema`: the schemas that objects of topics must fit: add, commit, check, roll back and delete."""

import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from purveyor.app.cli.backends.api_access import call_backend
from purveyor.app.cli.backends.schema_backend import DirectSchemas, RemoteSchemas, Schemas
from purveyor.app.cli.context import Cli, JsonFlag, Topics, YesFlag, confirm, examples
from purveyor.app.cli.output import write, write_json, write_note
from purveyor.app.cli.parsers import parse_topic
from purveyor.app.cli.render import format_block, format_table, read_time
from purveyor.model import json_fields
from purveyor.model.errors import InvalidInput, UnknownSchema
from purveyor.model.json_fields import Json
from purveyor.sources.schemas.registry import NewSchema
from purveyor.sources.schemas.schema import Compatibility, Encoding, SchemaType

app = typer.Typer(help="Define and check the schemas of topics.", rich_markup_mode=None, add_completion=False)
T = TypeVar("T")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The schema.")]
File = Annotated[str, typer.Argument(metavar="FILE|-", help="The definition, in JSON; - is standard input.")]
Compatible = Annotated[
    Compatibility | None,
    typer.Option(help="The compatibility that a new revision must keep; default: backward.", show_default=False),
]


@app.command(
    "add",
    epilog=examples(
        "purveyor schema add order order.json --topic shop:orders",
        "purveyor schema add user user.avsc --type avro --encoding binary --topic 'udm:users/.*'",
        "purveyor schema add order order-2.json",
        "purveyor schema add order --compatibility full",
    ),
)
def add(
    ctx: typer.Context,
    name: Name,
    file: Annotated[
        str | None, typer.Argument(metavar="[FILE|-]", help="The definition, in JSON; - is standard input.")
    ] = None,
    topic: Topics = None,
    kind: Annotated[
        SchemaType | None,
        typer.Option("--type", help="Default: json-schema; avro for a file with the suffix .avsc.", show_default=False),
    ] = None,
    encoding: Annotated[
        Encoding | None, typer.Option(help="The encoding of objects; binary is that of Avro.", show_default=False)
    ] = None,
    compatibility: Compatible = None,
    as_json: JsonFlag = False,
) -> None:
    """Add a schema, or commit a revision to an existing one; it is in force at once.

    The API and `purveyor publish` then refuse events of its topics whose new object does not fit; events that the
    pipeline makes of directory entries are not checked. A revision that is not compatible with the last one is
    refused. For an existing schema, --topic and --compatibility replace the old values.
    """
    definition = None if file is None else read_definition(file)
    topics = tuple(dict.fromkeys(map(parse_topic, topic or [])))
    cli = Cli.of(ctx, as_json)

    async def work(schemas: Schemas) -> tuple[Json, str]:
        try:
            before = await schemas.get(name)
        except UnknownSchema:
            if definition is None or not topics:
                raise InvalidInput(
                    f"there is no schema {name!r} yet", fix="give a definition and --topic REALM:TOPIC"
                ) from None
            guessed = SchemaType.AVRO if file is not None and file.endswith(".avsc") else SchemaType.JSON_SCHEMA
            new = NewSchema(
                name=name,
                type=kind or guessed,
                encoding=encoding or Encoding.JSON,
                compatibility=compatibility or Compatibility.BACKWARD,
                realms_topics=topics,
                definition=definition,
            )
            return await schemas.add(new), "Added"
        same_type = kind is None or kind.value == before["type"]
        if not same_type or (encoding is not None and encoding.value != before["encoding"]):
            raise InvalidInput(
                f"schema {name!r} is {before['type']}, encoded as {before['encoding']}",
                fix="another type or encoding needs another name",
            )
        after = before
        if topics or compatibility is not None:
            after = await schemas.change(name, compatibility, topics or None)
        if definition is not None:
            after = await schemas.commit(name, definition)
        is_new = after["revision"] != before["revision"]
        outcome = "Committed" if is_new else "Unchanged:" if after == before else "Changed"
        return after, outcome

    schema, outcome = _call(cli, work)
    if cli.json:
        write_json({**schema, "created": outcome == "Added", "committed": outcome == "Committed"}, indent=2)
    else:
        write(f"{outcome} schema {name}, revision {schema['revision']}")


@app.command("list", epilog=examples("purveyor schema list", "purveyor schema list --json"))
def list_(ctx: typer.Context, as_json: JsonFlag = False) -> None:
    """List the schemas."""
    cli = Cli.of(ctx, as_json)
    found = _call(cli, lambda schemas: schemas.list_schemas())
    for key, reason in found.unreadable.items():
        write_note(f"{key} cannot be read: {reason}")
    if cli.json:
        write_json(found.schemas, indent=2)
        return
    rows = [
        (
            each["name"],
            each["type"],
            each["encoding"],
            _labels(each),
            each["revision"],
            each["compatibility"],
            read_time(each["revision_created"]),
        )
        for each in found.schemas
    ]
    columns = ("NAME", "TYPE", "ENCODING", "TOPICS", "REVISION", "COMPATIBILITY", "COMMITTED")
    write(format_table(columns, rows, wrap=("TOPICS",)))


@app.command("show", epilog=examples("purveyor schema show order", "purveyor schema show order --revision 1 --json"))
def show(
    ctx: typer.Context,
    name: Name,
    revision: Annotated[int | None, typer.Option(metavar="NUMBER", help="Default: the revision in force.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show a schema with the definition in force, or with an earlier one."""
    cli = Cli.of(ctx, as_json)

    async def work(schemas: Schemas) -> tuple[Json, list[Json]]:
        return await schemas.get(name), await schemas.revisions(name)

    schema, revisions = _call(cli, work)
    number = schema["revision"] if revision is None else revision
    shown = next((each for each in revisions if each["number"] == number), None)
    if shown is None:
        known = ", ".join(str(each["number"]) for each in revisions)
        raise UnknownSchema(f"schema {name!r} has no revision {number}", fix=f"it has {known}")
    if cli.json:
        chosen = {"revision": number, "revision_created": shown["created"], "definition": shown["definition"]}
        write_json({**schema, **chosen}, indent=2)
        return
    rows: list[tuple[str, object]] = [
        ("Type", schema["type"]),
        ("Encoding", schema["encoding"]),
        ("Topics", _labels(schema)),
        ("Compatibility", schema["compatibility"]),
        ("Revisions", schema["revisions"]),
        ("Shown", number),
        ("Committed", read_time(shown["created"])),
        *([("Copy of", shown["copy_of"])] if shown.get("copy_of") is not None else []),
    ]
    write(format_block(f"Schema {name}", rows))
    write("\n" + json.dumps(shown["definition"], ensure_ascii=False, indent=2))


@app.command(
    "check",
    epilog=examples(
        "purveyor schema check order order-2.json",
        """purveyor schema check order --object '{"id": "17", "total": 12.5}'""",
    ),
)
def check(
    ctx: typer.Context,
    name: Name,
    file: Annotated[
        str | None, typer.Argument(metavar="[FILE|-]", help="A definition to check as the next revision.")
    ] = None,
    object_: Annotated[str | None, typer.Option("--object", metavar="JSON", help="An object to check.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check whether a definition could be the next revision, or an object fits the schema. Changes nothing.

    Exit codes: 0 yes; 1 no, or an error.
    """
    if (file is None) == (object_ is None):
        raise InvalidInput("exactly one of a definition and an object is needed", fix="give a file, or --object")
    definition = None if file is None else read_definition(file)
    cli = Cli.of(ctx, as_json)

    async def work(schemas: Schemas) -> list[str]:
        if definition is not None:
            return await schemas.check_definition(name, definition)
        is_binary = (await schemas.get(name))["encoding"] == Encoding.BINARY.value
        given = object_ or ""
        return await schemas.check_object(name, given if is_binary else json_fields.parse(given, "object"))

    problems = _call(cli, work)
    if cli.json:
        write_json({"name": name, "ok": not problems, "problems": problems})
    elif problems:
        write("\n".join(problems))
    else:
        write(f"The {'definition is compatible' if file else 'object fits'}")
    if problems:
        raise typer.Exit(1)


@app.command("rollback", epilog=examples("purveyor schema rollback order 1"))
def rollback(
    ctx: typer.Context,
    name: Name,
    revision: Annotated[int, typer.Argument(metavar="REVISION", help="The revision whose definition to restore.")],
    as_json: JsonFlag = False,
) -> None:
    """Put an earlier definition in force again as a new revision, compatible or not."""
    cli = Cli.of(ctx, as_json)
    schema = _call(cli, lambda schemas: schemas.roll_back(name, revision))
    if cli.json:
        write_json(schema, indent=2)
    else:
        write(f"Rolled schema {name} back to revision {revision}, which is revision {schema['revision']} now")


@app.command(
    "delete", epilog=examples("purveyor schema delete order --yes", "purveyor schema delete order --revision 1 --yes")
)
def delete(
    ctx: typer.Context,
    name: Name,
    revision: Annotated[int | None, typer.Option(metavar="NUMBER", help="Only this revision.")] = None,
    yes: YesFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Delete a schema, so that its topics accept any object, or a revision that is not in force."""
    what = f"schema {name}" if revision is None else f"revision {revision} of schema {name}"
    confirm(f"Delete {what}?", yes=yes)
    cli = Cli.of(ctx, as_json)
    _call(cli, lambda schemas: schemas.delete(name, revision))
    write_json({"name": name, "revision": revision, "deleted": True}) if cli.json else write(f"Deleted {what}")


def read_definition(file: str) -> Json:
    """Read a definition from a file or standard input."""
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise InvalidInput(f"the file {file} cannot be read: {error.strerror}", fix="check its name") from None
    return json_fields.parse(data, "definition")


def _labels(schema: Json) -> list[str]:
    return [f"{each['realm']}:{each['topic']}" for each in schema["realms_topics"]]


def _call(cli: Cli, work: Callable[[Schemas], Awaitable[T]]) -> T:
    return call_backend(cli, DirectSchemas.open, RemoteSchemas, work)
