"""Read a range of sequences as Arrow record batches."""
