"""Publish many messages and check every acknowledgement."""
