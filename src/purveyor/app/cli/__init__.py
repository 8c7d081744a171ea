"""The command line `purveyor`."""

from purveyor.app.cli.main import main

__all__ = ["main"]
