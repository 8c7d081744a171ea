"""The audit: for each subscription, expected = delivered + queued + dead-lettered, or what differs."""

from purveyor.pipeline.audit.audit import audit
from purveyor.pipeline.audit.report import Account, Findings, Location, Report

__all__ = ["Account", "Findings", "Location", "Report", "audit"]
