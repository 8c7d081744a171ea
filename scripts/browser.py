"""A browser for the tests of the console: found, or installed where that is allowed, or said to be missing.

    python -m scripts.browser

On Debian and its like, as root, Chromium comes with apt-get. Elsewhere nothing is touched: the tests that need a
browser are named, and left out.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TESTS = Path(__file__).parent.parent / "tests" / "app" / "console"


def find_browser() -> str | None:
    """The path of a Chromium; PURVEYOR_TEST_BROWSER names another."""
    named = os.environ.get("PURVEYOR_TEST_BROWSER")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


def install() -> bool:
    """Install it with the system's package manager, where we may; whether it is there now."""
    if os.name != "posix" or os.geteuid() != 0 or not shutil.which("apt-get"):
        return False
    print("== browser: installing chromium with apt-get", flush=True)
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", NAMES[0]],
    ):
        try:
            subprocess.run(command, env=quiet, capture_output=True, text=True, timeout=300, check=True)
        except subprocess.CalledProcessError as error:
            print(f"== browser: {' '.join(command)} failed: {error.stderr.strip().splitlines()[-1:]}", flush=True)
        except subprocess.TimeoutExpired:
            print(f"== browser: {' '.join(command)} takes too long", flush=True)
            break
    return find_browser() is not None


def tests_with_a_browser() -> list[str]:
    """The tests that are left out without one."""
    found = []
    for path in sorted(TESTS.glob("test_*.py")):
        found += [
            f"{path.name}::{name}"
            for name in re.findall(r"^def (test_\w+)\([^)]*\bbrowser:", path.read_text(), re.MULTILINE)
        ]
    return found


def main() -> None:
    if find_browser() is not None or install():
        return
    print("== browser: no Chromium, and it may not be installed here (root on Debian). These tests are left out:")
    for name in tests_with_a_browser():
        print(f"   {name}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
