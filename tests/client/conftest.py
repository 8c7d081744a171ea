"""Fixtures of the API of this worker and its clients."""

from tests.support.api_fixtures import admin, events, name, running_api

__all__ = ["admin", "events", "name", "running_api"]
