"""Push settings on their way in: endpoints that may not be reached are refused, secrets are encrypted before they lie.

What a definition holds afterwards are references (`model/push.py`). Given again, a secret that is there already keeps
its reference: asking for the same twice is the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from purveyor.app.settings import Settings
from purveyor.delivery.push.addresses import Network, check_endpoint, parse_ranges
from purveyor.delivery.push.sealing import SecretBox
from purveyor.delivery.push.signing import key_of
from purveyor.model.errors import InvalidInput
from purveyor.model.jsontext import Json
from purveyor.model.push import FROM_ENVIRONMENT, HIDDEN, SEALED, Push

GRACE: Final = "secret_grace_seconds"
"""Beside a new secret: for so long messages are signed with the one before as well."""
DEFAULT_GRACE_SECONDS: Final = 24 * 3600.0
_ENDPOINTS: Final = ("endpoint", "endpoints")
_SECRETS: Final = ("secret", "bearer_token")


def _no_box() -> SecretBox:
    raise InvalidInput("secrets cannot be stored here", fix="give env:NAME, a variable of the push worker")


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
        return self._stored({name: value for name, value in given.items() if name != GRACE}, existing)

    def changed(self, given: Json, existing: Push | None) -> Push:
        """Settings with what is given in place of what there was; null takes out. A replaced secret stays valid."""
        merged = {} if existing is None else existing.to_json()
        if any(name in given for name in _ENDPOINTS):
            merged = {name: value for name, value in merged.items() if name not in _ENDPOINTS}
        merged |= {name: value for name, value in given.items() if name != GRACE}
        push = self._stored(merged, existing)
        if existing is None or "secret" not in given or push.secret == existing.secret:
            return push
        stored = {name: value for name, value in push.to_json().items() if not name.startswith("old_secret")}
        grace = given.get(GRACE)
        seconds = DEFAULT_GRACE_SECONDS if grace is None else float(grace)
        if existing.secret is not None and push.secret is not None and seconds > 0:
            until = datetime.now(UTC) + timedelta(seconds=seconds)
            stored |= {"old_secret": existing.secret, "old_secret_until": until.isoformat()}
        return Push.from_json(stored)

    def _stored(self, given: Json, existing: Push | None) -> Push:
        stored = {name: value for name, value in given.items() if value is not None}
        before = {} if existing is None else existing.to_json()
        for name in _SECRETS:
            if name in stored:
                stored[name] = self._reference(name, stored[name], before.get(name))
        push = Push.from_json(stored)
        for url in push.endpoints:
            check_endpoint(url, self.allowed)
        return push

    def _reference(self, name: str, given: object, before: str | None) -> str:
        if not isinstance(given, str) or not given:
            raise InvalidInput(f"{name!r} is no text", fix="give the secret, or env:NAME")
        if before is not None and given in (HIDDEN, before):
            return before
        if given.startswith(FROM_ENVIRONMENT):
            return given
        if given == HIDDEN or given.startswith(SEALED):
            raise InvalidInput(f"{given[:10]!r} is no {name}", fix="give the secret itself, or env:NAME")
        if name == "secret":
            key_of(given)
        box = self.box()
        if before is not None and before.startswith(SEALED) and _is_same(box, before, given):
            return before
        return box.seal(given)


def _is_same(box: SecretBox, reference: str, secret: str) -> bool:
    try:
        return box.open(reference) == secret
    except InvalidInput:
        return False
