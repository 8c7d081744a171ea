"""Import LDIF files: parse records and store each of them once in the queue `ldif`."""
