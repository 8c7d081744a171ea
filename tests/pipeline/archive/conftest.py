"""The fixture of an archive of one stream."""

from tests.support.archive import archive

__all__ = ["archive"]
