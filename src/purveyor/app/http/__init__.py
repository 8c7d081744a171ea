"""The HTTP API: what consumers, publishers and administrators see of Purveyor."""
