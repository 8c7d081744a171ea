"""Everything on one machine: the parts of Purveyor as processes of one supervisor."""
