"""The archive: every event of `stream:incoming` in Parquet, by position, and the objects as of a position."""
