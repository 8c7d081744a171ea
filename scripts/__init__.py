"""Jobs around the project: generated pages."""
