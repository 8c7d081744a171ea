"""Follow an LDAP directory by RFC 4533: protocol, client and the reading of an access log. Knows no queue."""
