"""Find a browser for the tests of the console, install it where that is allowed, or report that it is missing.

    python -m scripts.browser

On Debian and similar systems, as root, the script installs Chromium with apt-get. Elsewhere it changes nothing and
lists the tests that are left out.
"""

import os
import re
import shutil
import sys
from pathlib import Path

from scripts.apt import install_packages

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TESTS = Path(__file__).parent.parent / "tests" / "app" / "console"


def find_browser() -> str | None:
    """Return the path of Chromium, or of the browser in PURVEYOR_TEST_BROWSER."""
    named = os.environ.get("PURVEYOR_TEST_BROWSER")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


def install() -> bool:
    """Install Chromium with the package manager, if allowed; return whether a browser is there now."""
    return install_packages("browser", NAMES[:1]) and find_browser() is not None


def find_browser_tests() -> list[str]:
    """Return the tests that are left out without a browser."""
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
    print("== browser: no Chromium, and no right to install it (root on Debian is needed). These tests are left out:")
    for name in find_browser_tests():
        print(f"   {name}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
