"""Fixtures for tests of `purveyor doctor`."""

from tests.support.api_fixtures import api, running_api

__all__ = ["api", "running_api"]
