"""Schemas of events: kept in the registry, known to every part that takes events in, and checked there."""
