"""A slapd per module for the tests of the LDAP source."""

from collections.abc import Iterator

import pytest

from tests.support.slapd import Slapd, SlapdOptions, require_slapd


@pytest.fixture(scope="module")
def slapd_options() -> SlapdOptions:
    """Return the options of the module's slapd; a module may override this."""
    return SlapdOptions()


@pytest.fixture(scope="module")
def slapd(tmp_path_factory: pytest.TempPathFactory, slapd_options: SlapdOptions) -> Iterator[Slapd]:
    """Start the slapd of this module, with the suffix and the accounts."""
    require_slapd()
    with Slapd(tmp_path_factory.mktemp("slapd"), slapd_options) as running:
        running.add_base()
        yield running
