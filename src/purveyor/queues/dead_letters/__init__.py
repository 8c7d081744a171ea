"""Stored dead letters: their format, and the store."""
