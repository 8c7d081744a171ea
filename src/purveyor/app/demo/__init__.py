"""`purveyor demo`: the whole system on sample data, with a check of every delivery."""
