"""Push delivery: a worker sends the messages of push subscriptions to HTTP endpoints."""
