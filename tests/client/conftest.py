"""The API as the tests of its routes start it."""

from tests.app.http.conftest import admin, events, name, running_api

__all__ = ["admin", "events", "name", "running_api"]
