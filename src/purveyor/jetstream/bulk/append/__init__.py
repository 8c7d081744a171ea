"""Append rows to many streams, each row exactly once, by the position that it carries."""
