"""JSON views that the command line, the HTTP API and the console share."""
