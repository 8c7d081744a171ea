"""The archive: every event of `stream:incoming` in Parquet, by position; tells what was, and what is, at a position."""
