"""Sources: what happens elsewhere, read once and put into a queue. Begins with LDIF, the text form of a directory."""
