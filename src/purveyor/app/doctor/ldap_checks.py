"""Checks of the directories in the settings: bind, base, limits, overlays and clock. They read, and change nothing."""

import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Final

from purveyor.app.doctor.machine_checks import Finding, note, ok, warning, wrong
from purveyor.app.ldap_settings import find_directories
from purveyor.app.settings import Settings
from purveyor.model.errors import PurveyorError
from purveyor.sources.ldap.accesslog_session import find_mode
from purveyor.sources.ldap.directory import Directory, Mode
from purveyor.sources.ldap.ldap_client import FollowOptions, LdapClient, connect
from purveyor.sources.ldap.ldap_errors import DirectoryRefused
from purveyor.sources.ldap.ldap_messages import NO_ATTRIBUTES, Scope
from purveyor.sources.ldap.source_status import csn_time
from purveyor.sources.ldap.sync_consumer import EntryReported
from purveyor.sources.ldap.sync_controls import SyncMode

_DEFAULT_LIMIT: Final = 500
"""The size limit of slapd for accounts without `limits`."""
_COUNTED_ENTRIES: Final = 2000
"""Enough to meet it."""
_CLOCK_WARN_SECONDS: Final = 5.0
_LOG_FIX: Final = "load the overlays accesslog and syncprov, and let the account read the log; or use mode syncrepl"
_CURRENT_TIME: Final = "cn=Current,cn=Time,cn=Monitor"


async def check_directories(settings: Settings) -> AsyncIterator[Finding]:
    """Check every directory of the settings."""
    try:
        directories = find_directories(settings)
    except PurveyorError as error:
        yield wrong("ldap", error.message, error.fix or "correct the settings")
        return
    for directory in directories:
        async for finding in _check_directory(directory):
            yield finding


async def _check_directory(directory: Directory) -> AsyncIterator[Finding]:
    about = f"ldap {directory.source}"
    try:
        async with connect(directory.address) as client:
            account = directory.bind_dn or "anonymous"
            yield ok(about, f"{directory.uri} accepts {account}")
            found = await client.search(directory.base, scope=Scope.BASE)
            if not found:
                yield wrong(
                    about, f"{account} cannot read {directory.base}", "give the account the right to read the base"
                )
                return
            if not any(name.lower() == "entryuuid" for name in found[0].attributes):
                yield wrong(
                    about,
                    f"{account} cannot read entryUUID, which identifies an entry",
                    "give the account the right to read operational attributes",
                )
            yield await _check_refresh(client, directory, about)
            yield await _check_mode(client, directory, about)
            yield await _check_clock(client, directory, about)
    except PurveyorError as error:
        yield wrong(about, error.message, error.fix or "does the directory run, and can this machine reach it?")


async def _check_refresh(client: LdapClient, directory: Directory, about: str) -> Finding:
    """Begin a refresh as the source does: it meets the size limit of the account, and the lack of the overlay."""
    options = FollowOptions(attributes=(NO_ATTRIBUTES,), mode=SyncMode.REFRESH_ONLY)
    count = 0
    following = client.follow_batches(directory.base, directory.filter, options=options)
    async with contextlib.aclosing(following) as batches:
        async for changes in batches:
            count += sum(isinstance(change, EntryReported) for change in changes)
            if count >= _COUNTED_ENTRIES:
                break
    more = " or more" if count >= _COUNTED_ENTRIES else ""
    if not count:
        return warning(about, f"no entry of {directory.base} matches {directory.filter}", "check the filter")
    few = count <= _DEFAULT_LIMIT
    limit = f"; a limit of {_DEFAULT_LIMIT}, slapd's default, would not show yet" if few else ", without a limit"
    return ok(about, f"syncprov sends {count:,}{more} entries of {directory.base}{limit}")


async def _check_mode(client: LdapClient, directory: Directory, about: str) -> Finding:
    try:
        mode = await find_mode(client, directory)
    except DirectoryRefused as error:
        return wrong(
            about,
            f"the accesslog {directory.accesslog_base} cannot be followed: {error.message}",
            error.fix or _LOG_FIX,
        )
    if mode is Mode.ACCESSLOG:
        return ok(about, f"{directory.accesslog_base} is followed: every operation arrives")
    if directory.mode is Mode.SYNCREPL:
        return ok(about, "changes are followed by syncrepl, as set")
    return note(
        about,
        "changes are followed by syncrepl: intermediate versions between two refreshes are not seen",
        f"the overlay accesslog, with syncprov on {directory.accesslog_base} and the right to read it, has all of them",
    )


async def _check_clock(client: LdapClient, directory: Directory, about: str) -> Finding:
    """Compare the clocks, if the server shows its own, or a change that is not over yet by ours."""
    ahead: float | None = None
    try:
        found = await client.search(_CURRENT_TIME, scope=Scope.BASE, attributes=("monitorTimestamp",))
        times = [csn_time(value.decode()) for entry in found for each in entry.attributes.values() for value in each]
        if times and times[0] is not None:
            ahead = (times[0] - datetime.now(UTC)).total_seconds()
    except (PurveyorError, UnicodeDecodeError):
        pass  # most servers do not show it to readers
    if ahead is None:
        found = await client.search(directory.base, scope=Scope.BASE, attributes=("contextCSN", "modifyTimestamp"))
        newest = [csn_time(value.decode()) for entry in found for each in entry.attributes.values() for value in each]
        ahead = max(((at - datetime.now(UTC)).total_seconds() for at in newest if at is not None), default=0.0)
        if ahead <= _CLOCK_WARN_SECONDS:
            return ok(about, "no change in the directory is ahead of the clock of this machine")
    if abs(ahead) <= _CLOCK_WARN_SECONDS:
        return ok(about, f"the clocks differ by {abs(ahead):.0f} s")
    direction = "ahead of" if ahead > 0 else "behind"
    return warning(
        about,
        f"the clock of the directory is {abs(ahead):.0f} s {direction} this machine's, so the shown lag is wrong",
        "synchronise both with NTP",
    )
