"""Delivery: subscriptions, delivery state and leases, pull, push, dead letters and credentials."""
