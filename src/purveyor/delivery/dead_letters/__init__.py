"""Park, list, redrive and discard the dead letters of subscriptions."""
