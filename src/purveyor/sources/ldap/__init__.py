"""Sources of directories: follows an LDAP server live, and writes its records into the queue `ldif`."""
