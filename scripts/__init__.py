"""Scripts of the project: generated pages, source checks, a browser for tests, flaky tests, other Pythons."""
