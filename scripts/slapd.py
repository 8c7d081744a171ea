"""Find slapd for the tests of the LDAP source, install it where that is allowed, or report that it is missing.

    python -m scripts.slapd

On Debian and similar systems, as root, the script installs slapd and ldap-utils with apt-get, and does not let the
package start its own server. Elsewhere it changes nothing and lists the tests that are left out.
"""

import os
import re
import shutil
import sys
from pathlib import Path

from scripts.apt import install_packages

PACKAGES = ("slapd", "ldap-utils")
TESTS = Path(__file__).parent.parent / "tests"
_PLACES = os.pathsep.join(("/usr/sbin", "/usr/local/sbin", "/usr/libexec", "/usr/local/libexec"))
_MARK = "tests.support.slapd"


def find_slapd() -> str | None:
    """Return the path of slapd, or the program in PURVEYOR_TEST_SLAPD."""
    named = os.environ.get("PURVEYOR_TEST_SLAPD")
    return named or shutil.which("slapd") or shutil.which("slapd", path=_PLACES)


def is_ready() -> bool:
    """Return whether slapd and the programs of ldap-utils are there."""
    return find_slapd() is not None and shutil.which("ldapmodify") is not None


def find_slapd_tests() -> list[str]:
    """Return the tests that are left out without slapd: those of modules that start it."""
    found = []
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text()
        if _MARK in text:
            names = re.findall(r"^(?:async )?def (test_\w+)", text, re.MULTILINE)
            found += [f"{path.relative_to(TESTS)}::{name}" for name in names]
    return found


def main() -> None:
    if is_ready():
        return
    if install_packages("slapd", PACKAGES, start_services=False) and is_ready():
        return
    print("== slapd: no slapd, and no right to install it (root on Debian is needed). These tests are left out:")
    for name in find_slapd_tests():
        print(f"   {name}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
