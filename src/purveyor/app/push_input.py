"""Check push settings that a user gives: refuse endpoints that may not be reached, encrypt secrets for storage.

A stored definition holds references to secrets (`model/push_config.py`). A secret that is given again unchanged keeps
its reference.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from purveyor.app.settings import Settings
from purveyor.delivery.push.egress_policy import Network, check_endpoint, parse_ranges
from purveyor.delivery.push.secret_encryption import SecretBox
from purveyor.delivery.push.signing import key_of
from purveyor.model.errors import InvalidInput
from purveyor.model.json_fields import Json
from purveyor.model.push_config import (
    FROM_ENVIRONMENT,
    HIDDEN,
    SEALED,
    SECRET_PREFIX,
    Push,
    secret_variable,
)

GRACE: Final = "secret_grace_seconds"
"""Beside a new secret: for so long messages are signed with the one before as well."""
DEFAULT_GRACE_SECONDS: Final = 24 * 3600.0
_ENDPOINTS: Final = ("endpoint", "endpoints")
_SECRETS: Final = ("secret", "bearer_token")
_OLD: Final = "old_secret"
"""How the names of the fields begin that hold the secret before."""
_FIX: Final = f"give the secret itself, or env:{SECRET_PREFIX}..., a variable of the push worker"


def _no_box() -> SecretBox:
    raise InvalidInput(
        "secrets cannot be stored here", fix=f"give env:{SECRET_PREFIX}..., a variable of the push worker"
    )


def box_of(settings: Settings) -> SecretBox:
    """With the key of the settings, or the one in the data directory."""
    if settings.push_key is not None:
        return SecretBox(settings.push_key.get_secret_value())
    return SecretBox.at(settings.data_dir)


@dataclass(frozen=True, slots=True)
class PushEdge:
    """See the module."""

    box: Callable[[], SecretBox] = _no_box
    """Made when it is needed: most deployments have no secret to keep."""
    allowed: Sequence[Network] = ()

    @classmethod
    def of(cls, settings: Settings) -> "PushEdge":
        """As the settings say."""
        return cls(lambda: box_of(settings), parse_ranges(settings.push_allow))

    def added(self, given: Json, existing: Push | None = None) -> Push:
        """The settings of a new subscription; `existing` are those of one that is there, if it is added again."""
        wanted = {name: value for name, value in given.items() if name != GRACE}
        return self._stored(wanted, given, existing)

    def changed(self, given: Json, existing: Push | None) -> Push:
        """Settings with what is given in place of what there was; null takes out. A replaced secret stays valid."""
        merged = {} if existing is None else existing.to_json()
        if any(name in given for name in _ENDPOINTS):
            merged = {name: value for name, value in merged.items() if name not in _ENDPOINTS}
        merged |= {name: value for name, value in given.items() if name != GRACE}
        push = self._stored(merged, given, existing)
        if existing is None or "secret" not in given or push.secret == existing.secret or _moves(push, existing):
            return push
        stored = {name: value for name, value in push.to_json().items() if not name.startswith(_OLD)}
        grace = given.get(GRACE)
        seconds = DEFAULT_GRACE_SECONDS if grace is None else float(grace)
        if existing.secret is not None and push.secret is not None and seconds > 0:
            until = datetime.now(UTC) + timedelta(seconds=seconds)
            stored |= {"old_secret": existing.secret, "old_secret_until": until.isoformat()}
        return Push.from_json(stored)

    def _stored(self, wanted: Json, given: Json, existing: Push | None) -> Push:
        """Check what is wanted, of which `given` was asked for now, and put references in place of secrets."""
        stored = {name: value for name, value in wanted.items() if value is not None}
        before = {} if existing is None else existing.to_json()
        if existing is not None and _moves(Push.from_json(_without_secrets(stored)), existing):
            _check_given_again(stored, given)
            stored = {name: value for name, value in stored.items() if not name.startswith(_OLD)}
            before = {}
        for name in _SECRETS:
            if name in stored:
                stored[name] = self._reference(name, stored[name], before.get(name))
        push = Push.from_json(stored)
        for url in push.endpoints:
            check_endpoint(url, self.allowed)
        return push

    def _reference(self, name: str, given: object, before: str | None) -> str:
        if not isinstance(given, str) or not given:
            raise InvalidInput(f"{name!r} is no text", fix=_FIX)
        if before is not None and given in (HIDDEN, before):
            return before
        if given.startswith(FROM_ENVIRONMENT):
            secret_variable(given)
            return given
        if given == HIDDEN or given.startswith(SEALED):
            raise InvalidInput(f"{given[:10]!r} is no {name}", fix=_FIX)
        if name == "secret":
            key_of(given)
        box = self.box()
        if before is not None and before.startswith(SEALED) and _is_same(box, before, given):
            return before
        return box.seal(given)


def _without_secrets(stored: Json) -> Json:
    return {name: value for name, value in stored.items() if name not in _SECRETS and not name.startswith(_OLD)}


def _moves(push: Push, existing: Push) -> bool:
    """Whether messages go to a host that they did not go to."""
    return not {each.origin for each in push.targets} <= {each.origin for each in existing.targets}


def _check_given_again(stored: Json, given: Json) -> None:
    kept = [name for name in _SECRETS if name in stored and given.get(name) in (None, HIDDEN)]
    if kept:
        raise InvalidInput(
            f"the endpoint is at another host, and {' and '.join(kept)} would be sent there",
            fix=f"give {' and '.join(kept)} again together with the endpoint; over HTTP, null goes on without",
        )


def _is_same(box: SecretBox, reference: str, secret: str) -> bool:
    try:
        return box.open(reference) == secret
    except InvalidInput:
        return False
