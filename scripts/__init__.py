"""Jobs around the project: generated pages, a browser for tests, the hunt for flaky tests, other Pythons."""
