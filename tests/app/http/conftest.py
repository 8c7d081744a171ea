"""Fixtures of the API of this worker and its clients."""

from tests.support.api_fixtures import admin, api, consumer, events, name, running_api

__all__ = ["admin", "api", "consumer", "events", "name", "running_api"]
