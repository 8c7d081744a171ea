"""The composition root and the surfaces: settings, and the command line."""
