"""Sources: programs that turn changes of an outside system into events or raw records of a queue."""
