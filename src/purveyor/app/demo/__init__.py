"""The demo: the whole system on sample data, which verifies itself."""
