"""Delivery: who gets what (subscriptions), and how it is handed over."""
