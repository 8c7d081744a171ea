"""Publish many messages with every acknowledgement checked."""
