"""Telemetry: metrics for Prometheus, traces for OpenTelemetry, logs for people and programs."""
