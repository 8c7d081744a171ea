"""Reads one directory into a writer: decides how, and from where, and begins again when a cookie is not valid."""

from collections.abc import Callable
from typing import Final

from purveyor.sources.ldap.directory import Directory, Mode
from purveyor.sources.ldap.ldap_client import LdapClient
from purveyor.sources.ldap.ldap_messages import Scope
from purveyor.sources.ldap.record_writer import RecordWriter
from purveyor.sources.ldap.source_status import SourceStatus
from purveyor.sources.ldap.source_store import SourceState
from purveyor.sources.ldap.sync_cookie import server_of
from purveyor.sources.ldap.sync_session import Place, RefreshDue, SecretFilter, SyncSession, csns_of

_CONTEXT_CSN: Final = "contextCSN"


class DirectoryReader:
    """One connection to a directory. `on_notice` gets what an operator may want to know."""

    def __init__(
        self,
        directory: Directory,
        status: SourceStatus,
        secrets: SecretFilter,
        on_notice: Callable[[str], None],
    ) -> None:
        self._directory = directory
        self._status = status
        self._secrets = secrets
        self._on_notice = on_notice

    async def choose_mode(self, client: LdapClient) -> Mode:
        """Return how to read the changes of this server."""
        return Mode.SYNCREPL

    async def run(
        self, client: LdapClient, mode: Mode, writer: RecordWriter[Place], state: SourceState | None, epoch: int
    ) -> None:
        """Read until the connection ends, which is an error."""
        cookie = await self._valid_cookie(client, mode, state)
        self._status.entries = state.entries if state is not None and cookie is not None else None
        while True:
            session = SyncSession(self._directory, writer, self._status, self._secrets, epoch=epoch)
            try:
                await session.follow(client, cookie)
            except RefreshDue as due:
                self._on_notice(f"the directory cannot continue from the cookie: {due.message}; a full refresh begins")
                cookie = None

    async def _valid_cookie(self, client: LdapClient, mode: Mode, state: SourceState | None) -> str | None:
        """Return the cookie to continue from; None if a full refresh is due."""
        if state is None or state.cookie is None:
            return None
        if not state.continues(self._directory, mode):
            self._on_notice("base, filter or mode changed since the cookie was stored: a full refresh begins")
            return None
        known = csns_of(state.cookie)
        if not known:
            return state.cookie
        newest = {server_of(csn): csn for csn in await read_context_csns(client, self._directory.base)}
        if newest and any(csn > newest.get(server_of(csn), "") for csn in known):
            self._on_notice("the directory is older than the cookie, as after a restored backup: a full refresh begins")
            return None
        return state.cookie


async def read_context_csns(client: LdapClient, base: str) -> tuple[str, ...]:
    """Return the newest CSN of each server of the database with this base; none if the account may not see them."""
    contexts = (await client.read_root_dse()).naming_contexts
    place = normalise_dn(base)
    suffixes = [each for each in contexts if f",{place}".endswith(f",{normalise_dn(each)}")]
    if not suffixes:
        return ()
    found = await client.search(max(suffixes, key=len), scope=Scope.BASE, attributes=(_CONTEXT_CSN,))
    values = (values for entry in found for name, values in entry.attributes.items() if name.lower() == "contextcsn")
    return tuple(value.decode(errors="replace") for each in values for value in each)


def normalise_dn(dn: str) -> str:
    """Return a form of a DN for comparisons: without case, and without spaces around its separators.

    >>> normalise_dn("OU=People, dc=Example,DC = org")
    'ou=people,dc=example,dc=org'
    """
    return ",".join("=".join(part.strip() for part in rdn.split("=")) for rdn in dn.lower().split(","))
