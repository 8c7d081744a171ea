"""Blocking NATS connections for bulk reads and writes: connect, frames, requests, a pool."""
