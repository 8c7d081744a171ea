"""How the system is watched: metrics for Prometheus, traces for OpenTelemetry, logs for people and programs."""
