"""Reads one directory into a writer: decides how, and from where, and begins again when a cookie is not valid."""

from collections.abc import Callable

from purveyor.sources.ldap.accesslog_session import AccesslogSession, find_mode
from purveyor.sources.ldap.cookie_saver import CookieSaver
from purveyor.sources.ldap.directory import Directory, Mode
from purveyor.sources.ldap.ldap_client import LdapClient
from purveyor.sources.ldap.record_writer import RecordWriter
from purveyor.sources.ldap.source_status import SourceStatus
from purveyor.sources.ldap.source_store import SourceState, Taken
from purveyor.sources.ldap.sync_session import Place, RefreshDue, SecretFilter, SyncSession


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
        return await find_mode(client, self._directory)

    async def run(
        self, client: LdapClient, mode: Mode, writer: RecordWriter[Place], taken: Taken, saver: CookieSaver
    ) -> None:
        """Read until the connection ends, which is an error. Before a full refresh the stored cookie is removed."""
        state = taken.state
        cookie = self._valid_cookie(mode, state)
        self._status.entries = state.entries if state is not None and cookie is not None else None
        while True:
            if cookie is None:
                await writer.flush()  # a place before it must not be stored later
                await saver.forget()
            session = SyncSession(self._directory, writer, self._status, self._secrets, epoch=taken.epoch)
            try:
                if mode is Mode.ACCESSLOG:
                    by_log = AccesslogSession(self._directory, session, self._status, self._secrets)
                    await by_log.follow(client, cookie)
                else:
                    await session.follow(client, cookie)
            except RefreshDue as due:
                self._on_notice(f"the directory cannot continue from the cookie: {due.message}; a full refresh begins")
                cookie = None

    def _valid_cookie(self, mode: Mode, state: SourceState | None) -> str | None:
        """Return the cookie to continue from; None if a full refresh is due."""
        if state is None or state.cookie is None:
            return None
        if not state.continues(self._directory, mode):
            self._on_notice("base, filter or mode changed since the cookie was stored: a full refresh begins")
            return None
        return state.cookie
