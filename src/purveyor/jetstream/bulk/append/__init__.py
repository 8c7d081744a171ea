"""Append rows to many streams, each row once, by the position that it carries."""
