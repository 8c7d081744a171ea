"""`purveyor up`: the parts of Purveyor as processes of one supervisor."""
