"""Starting Spark quickly on one machine.

Two things make the difference. Python workers import pyspark from a zip without compiled files, and there is a new
process for every part of a query: a Spark home without that zip makes them use the installed package. And the JVM loads
some 20,000 classes: an archive of them, made once by `training.warm_up`, is mapped into memory instead.
"""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyspark

from purveyor.spark.java import Java

_PARALLEL: Final = "-XX:+UseParallelGC"
"""What Spark makes dies young, in a heap of one or two gigabytes: pauses are short, and G1 costs more than it saves."""
_ANY_COLLECTOR: Final = re.compile(r"-XX:\+Use\w*GC\b")
_OPTIONS: Final = ("SPARK_SUBMIT_OPTS", "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS")


def collector() -> str:
    """The option that chooses a garbage collector, unless somebody has chosen one: a JVM does not start with two."""
    chosen = [os.environ.get(name, "") for name in _OPTIONS]
    defaults = Path(os.environ.get("SPARK_CONF_DIR", "")) / "spark-defaults.conf"
    if os.environ.get("SPARK_CONF_DIR") and defaults.is_file():
        chosen.append(defaults.read_text(errors="replace"))
    return "" if any(_ANY_COLLECTOR.search(each) for each in chosen) else _PARALLEL


@dataclass(frozen=True, slots=True)
class QuickStart:
    """Where to start Spark from, and the archive of its classes (which may not be made yet)."""

    home: Path
    archive: Path

    def java_options(self) -> str:
        """For the driver's JVM. An archive that does not fit is ignored by it."""
        if not self.archive.is_file():
            return collector()
        archive = f"-XX:SharedArchiveFile={self.archive} -Xshare:auto -Xlog:cds=off -Xlog:cds+dynamic=off"
        return f"{collector()} {archive}".strip()


def user_cache() -> Path:
    """Where what is made once per machine is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "purveyor"


def quick_start(java: Java, cache: Path) -> QuickStart:
    """The quick way for this Java and this installation of Spark."""
    package = Path(pyspark.__file__).parent
    identity = hashlib.sha256(f"{pyspark.__version__} {package} {java.home} {java.build}".encode()).hexdigest()[:12]
    home = cache / f"spark-{pyspark.__version__}-{identity}"
    lay_out(package, home)
    return QuickStart(home, cache / f"spark-{pyspark.__version__}-{identity}.jsa")


def lay_out(package: Path, home: Path) -> None:
    """A Spark home of links to the installed package, without the zipped Python code."""
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
