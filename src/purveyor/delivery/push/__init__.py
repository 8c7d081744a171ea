"""Push: messages of subscriptions are sent to HTTP endpoints, which acknowledge them by a status code."""
