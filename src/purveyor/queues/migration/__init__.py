"""Migration: empty or archive a queue whose stream cannot change in place, and create the stream again without loss.

`plan` compares and chooses a strategy, `record` is written before the stream is touched, `drain` and `snapshot` move
the messages, `recreate` makes the new stream, `lease` allows one process at a time, `migrator` runs all of it.
"""
