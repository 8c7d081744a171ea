"""Migration: a queue whose stream cannot change in place is emptied, or carried over, and made again; nothing is lost.

plan (what would be done) -> record (what was begun) -> drain or snapshot -> recreate; fence keeps it to one at a time.
"""
