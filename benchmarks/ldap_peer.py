"""The refresh of python-ldap, which throws the entries away: a program for a Python that has it, without Purveyor.

`python ldap_peer.py URI BASE BIND_DN`, with the password in LDAP_PASSWORD, prints as JSON the entries, the
seconds, and the seconds of the processor.
"""

import json
import os
import sys
import time

import ldap
from ldap.ldapobject import SimpleLDAPObject
from ldap.syncrepl import SyncreplConsumer


class Consumer(SimpleLDAPObject, SyncreplConsumer):  # type: ignore[misc] # python-ldap has no types
    """Counts entries until the refresh is complete."""

    entries = 0
    began = began_processor = 0.0
    is_complete = False

    def syncrepl_entry(self, dn: str, attributes: object, uuid: str) -> None:
        """Take the time of the first entry: binding and searching are not part of the comparison."""
        del dn, attributes, uuid
        if not self.entries:
            self.began, self.began_processor = time.perf_counter(), time.process_time()
        self.entries += 1

    def syncrepl_refreshdone(self) -> None:
        """Note the end of the refresh."""
        self.is_complete = True


def main() -> None:
    uri, base, bind_dn = sys.argv[1:]
    consumer = Consumer(uri)
    consumer.simple_bind_s(bind_dn, os.environ["LDAP_PASSWORD"])
    search = consumer.syncrepl_search(
        base, ldap.SCOPE_SUBTREE, mode="refreshAndPersist", filterstr="(objectClass=*)", attrlist=["*", "+"]
    )
    while not consumer.is_complete:
        consumer.syncrepl_poll(msgid=search)
    seconds, processor = time.perf_counter() - consumer.began, time.process_time() - consumer.began_processor
    print(json.dumps({"entries": consumer.entries, "seconds": seconds, "processor": processor}))


if __name__ == "__main__":
    main()
