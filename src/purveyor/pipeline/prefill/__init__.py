"""Prefill, replay and catch-up: Spark batch jobs that fill a subscription's queue from the archive."""

from purveyor.pipeline.prefill.worker import PrefillWorker, WorkerOptions

__all__ = ["PrefillWorker", "WorkerOptions"]
