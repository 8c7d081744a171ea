"""Starting Spark quickly on one machine.

Two things make the difference. Python workers import pyspark from a zip without compiled files, and there is a new
process for every part of a query: a Spark home without that zip makes them use the installed package. And the JVM loads
some 20,000 classes: an archive of them, made once by `training.warm_up`, is mapped into memory instead.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyspark

from purveyor.spark.java import Java

COLLECTOR: Final = "-XX:+UseParallelGC"
"""What Spark makes dies young, in a heap of one or two gigabytes: pauses are short, and G1 costs more than it saves."""


@dataclass(frozen=True, slots=True)
class QuickStart:
    """Where to start Spark from, and the archive of its classes (which may not be made yet)."""

    home: Path
    archive: Path

    def java_options(self) -> str:
        """For the driver's JVM. An archive that does not fit is ignored by it."""
        if not self.archive.is_file():
            return COLLECTOR
        return f"{COLLECTOR} -XX:SharedArchiveFile={self.archive} -Xshare:auto -Xlog:cds=off -Xlog:cds+dynamic=off"


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
