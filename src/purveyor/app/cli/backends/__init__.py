"""The work of commands: for each group of commands one interface, directly on NATS and over the HTTP API."""
