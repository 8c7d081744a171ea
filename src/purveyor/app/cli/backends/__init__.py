"""What commands do on the server: for each group of commands one interface, directly on NATS and over the HTTP API."""
