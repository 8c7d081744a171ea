"""The parts that run on one machine, as commands of this program, in the order in which they need each other. Pure."""

import sys
from dataclasses import dataclass
from typing import Final

PROGRAM: Final = (sys.executable, "-c", "from purveyor.app.cli import main; main()")
"""This program, in a process of its own."""
NATS: Final = "NATS"
PIPELINE: Final = "pipeline"
API: Final = "API"
PUSH: Final = "push"


@dataclass(frozen=True, slots=True)
class Part:
    """A part: its command line, and how long it may take to end when it is asked to."""

    name: str
    command: tuple[str, ...]
    grace_seconds: float
    needed: bool = False
    """The parts after it are started when it is ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to run. `options` stand before the command of every part."""

    options: tuple[str, ...] = ()
    with_nats: bool = True
    pipeline: tuple[str, ...] = ()
    push: tuple[str, ...] = ()
    api: tuple[str, ...] = ()
    nats: tuple[str, ...] = ()


def parts(wanted: Wanted) -> tuple[Part, ...]:
    """In the order of their start; they are stopped in the opposite one: who asks first, who answers last.

    >>> [part.name for part in parts(Wanted())]
    ['NATS', 'pipeline', 'push', 'API']
    """

    def command(name: str, *flags: str) -> tuple[str, ...]:
        return (*PROGRAM, *wanted.options, "serve", name, "--json", *flags)

    nats = Part(NATS, command("nats", *wanted.nats), grace_seconds=20, needed=True)
    return (
        *((nats,) if wanted.with_nats else ()),
        Part(PIPELINE, command("pipeline", *wanted.pipeline), grace_seconds=60),
        Part(PUSH, command("push", *wanted.push), grace_seconds=20),
        Part(API, command("api", *wanted.api), grace_seconds=20),
    )
