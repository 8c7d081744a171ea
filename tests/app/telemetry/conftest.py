"""The API as the tests of its routes have it."""

from tests.app.http.conftest import admin, api, consumer, events, name, running_api

__all__ = ["admin", "api", "consumer", "events", "name", "running_api"]
