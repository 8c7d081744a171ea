"""Purveyor: every change, to every subscriber, in order, once."""

__version__ = "0.1.0"
