"""Schemas of events: stored in a registry, cached by the programs that accept events, and checked there."""
