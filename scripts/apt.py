"""Install Debian packages that some tests need, where this process may do so."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

_UPDATED = Path(sys.prefix) / ".apt-updated"
"""Written after an update of the package lists, so that several scripts of one run share it."""
_UPDATE_AGAIN_SECONDS = 3600
_SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"


def may_install() -> bool:
    """Return whether this process can install packages: as root, on a system with apt-get."""
    return os.name == "posix" and os.geteuid() == 0 and shutil.which("apt-get") is not None


def install_packages(purpose: str, packages: Sequence[str], *, start_services: bool = True) -> bool:
    """Install packages if that is allowed; return whether apt-get did so."""
    if not may_install():
        return False
    print(f"== {purpose}: installing {', '.join(packages)} with apt-get", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        if not _is_fresh():
            if not _run(purpose, ["apt-get", "update", "-qq"]):
                return False
            _UPDATED.touch()
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends"]
        if not start_services:
            install += ["-o", f"DPkg::Path={_without_services(Path(folder))}:{_SYSTEM_PATH}"]
        return _run(purpose, [*install, *packages])


def _without_services(folder: Path) -> Path:
    """Fill a folder with programs that do nothing, in the place of those by which a package starts its service."""
    for name in ("invoke-rc.d", "deb-systemd-invoke"):
        program = folder / name
        program.write_text("#!/bin/sh\nexit 0\n")
        program.chmod(0o755)
    return folder


def _is_fresh() -> bool:
    return _UPDATED.exists() and 0 <= time.time() - _UPDATED.stat().st_mtime < _UPDATE_AGAIN_SECONDS


def _run(purpose: str, command: Sequence[str]) -> bool:
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        subprocess.run(command, env=quiet, capture_output=True, text=True, timeout=300, check=True)
    except subprocess.CalledProcessError as error:
        print(f"== {purpose}: {' '.join(command)} failed: {error.stderr.strip().splitlines()[-1:]}", flush=True)
        return False
    except subprocess.TimeoutExpired:
        print(f"== {purpose}: {' '.join(command)} takes too long", flush=True)
        return False
    return True
