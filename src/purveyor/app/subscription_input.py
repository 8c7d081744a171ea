"""Build the definition of a subscription from the options that a user gives: in a request, or as flags of a command.

Options have the names and the form of the HTTP API on every surface, with secrets in clear. `Subscription.from_json`
checks the rules. `PushInput` checks push settings: it rejects endpoints that push may not reach, and encrypts secrets.

A stored definition holds references to secrets (`model/delivery_policy.py`). A secret that is given again unchanged
keeps its reference.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from purveyor.app.settings import Settings
from purveyor.delivery.push.egress_policy import Network, check_endpoint, parse_ranges
from purveyor.delivery.push.push_request import SecretCipher, parse_signing_key
from purveyor.model.delivery_policy import (
    FROM_ENVIRONMENT,
    HIDDEN,
    LONGEST_DELAY_SECONDS,
    SEALED,
    SECRET_PREFIX,
    Delivery,
    Push,
    secret_variable,
)
from purveyor.model.errors import InvalidInput
from purveyor.model.json_fields import Json
from purveyor.model.subscription import Subscription

SECRET_GRACE_FIELD: Final = "secret_grace_seconds"
"""Given beside a new secret: for this long push also signs with the old secret."""
DEFAULT_GRACE_SECONDS: Final = 24 * 3600.0
_ENDPOINT_FIELDS: Final = ("endpoint", "endpoints")
_SECRET_FIELDS: Final = ("secret", "bearer_token")
_OLD_SECRET_PREFIX: Final = "old_secret"
"""The names of the fields that hold the old secret begin with this."""
_FIX: Final = f"give the secret itself, or env:{SECRET_PREFIX}..., a variable of the push worker"


def _no_cipher() -> SecretCipher:
    raise InvalidInput(
        "secrets cannot be stored here", fix=f"give env:{SECRET_PREFIX}..., a variable of the push worker"
    )


def open_cipher(settings: Settings) -> SecretCipher:
    """Return a cipher with the key from the settings, or with the key file in the data directory."""
    if settings.push_key is not None:
        return SecretCipher(settings.push_key.get_secret_value())
    return SecretCipher.from_directory(settings.data_dir)


@dataclass(frozen=True, slots=True)
class PushInput:
    """Parses the push settings of a subscription that a user adds or changes."""

    cipher: Callable[[], SecretCipher] = _no_cipher
    """Called when a secret is to be stored: most deployments have none."""
    allowed: Sequence[Network] = ()

    @classmethod
    def from_settings(cls, settings: Settings) -> "PushInput":
        """Use the key and the allowed addresses of the settings."""
        return cls(lambda: open_cipher(settings), parse_ranges(settings.push_allow))

    def parse_new(self, given: Json, existing: Push | None = None) -> Push:
        """Parse the settings of a new subscription; `existing` is set if one of that name exists."""
        wanted = {name: value for name, value in given.items() if name != SECRET_GRACE_FIELD}
        return self._parse(wanted, given, existing)

    def parse_change(self, given: Json, existing: Push | None) -> Push:
        """Merge given fields into existing settings; null removes a field. An old secret stays valid for a while."""
        merged = {} if existing is None else existing.to_json()
        if any(name in given for name in _ENDPOINT_FIELDS):
            merged = {name: value for name, value in merged.items() if name not in _ENDPOINT_FIELDS}
        merged |= {name: value for name, value in given.items() if name != SECRET_GRACE_FIELD}
        push = self._parse(merged, given, existing)
        if existing is None or "secret" not in given or push.secret == existing.secret or _has_new_host(push, existing):
            return push
        stored = {name: value for name, value in push.to_json().items() if not name.startswith(_OLD_SECRET_PREFIX)}
        grace = given.get(SECRET_GRACE_FIELD)
        seconds = DEFAULT_GRACE_SECONDS if grace is None else float(grace)
        if not 0 <= seconds <= LONGEST_DELAY_SECONDS:
            raise InvalidInput(f"a grace of {seconds:g} seconds", fix=f"give 0 to {LONGEST_DELAY_SECONDS:g}")
        if existing.secret is not None and push.secret is not None and seconds > 0:
            until = datetime.now(UTC) + timedelta(seconds=seconds)
            stored |= {"old_secret": existing.secret, "old_secret_until": until.isoformat()}
        return Push.from_json(stored)

    def _parse(self, wanted: Json, given: Json, existing: Push | None) -> Push:
        """Check the wanted settings, and replace secrets by references. `given` are the fields of this request."""
        stored = {name: value for name, value in wanted.items() if value is not None}
        before = {} if existing is None else existing.to_json()
        if existing is not None and _has_new_host(Push.from_json(_without_secrets(stored)), existing):
            _check_secrets_given_again(stored, given)
            stored = {name: value for name, value in stored.items() if not name.startswith(_OLD_SECRET_PREFIX)}
            before = {}
        for name in _SECRET_FIELDS:
            if name in stored:
                stored[name] = self._reference(name, stored[name], before.get(name))
        push = Push.from_json(stored)
        for url in push.endpoints:
            check_endpoint(url, self.allowed)
        return push

    def _reference(self, name: str, given: object, before: str | None) -> str:
        if not isinstance(given, str) or not given:
            raise InvalidInput(f"{name!r} is not a text", fix=_FIX)
        if before is not None and given in (HIDDEN, before):
            return before
        if given.startswith(FROM_ENVIRONMENT):
            secret_variable(given)
            return given
        if given == HIDDEN or given.startswith(SEALED):
            raise InvalidInput(f"{given[:10]!r} is not a {name}", fix=_FIX)
        if name == "secret":
            parse_signing_key(given)
        cipher = self.cipher()
        if before is not None and before.startswith(SEALED) and _is_same(cipher, before, given):
            return before
        return cipher.encrypt(given)


def _without_secrets(stored: Json) -> Json:
    return {
        name: value
        for name, value in stored.items()
        if name not in _SECRET_FIELDS and not name.startswith(_OLD_SECRET_PREFIX)
    }


def _has_new_host(push: Push, existing: Push) -> bool:
    """Return whether messages would go to a host that they did not go to before."""
    return not {each.origin for each in push.targets} <= {each.origin for each in existing.targets}


def _check_secrets_given_again(stored: Json, given: Json) -> None:
    kept = [name for name in _SECRET_FIELDS if name in stored and given.get(name) in (None, HIDDEN)]
    if kept:
        raise InvalidInput(
            f"the endpoint is at another host, and {' and '.join(kept)} would be sent there",
            fix=f"give {' and '.join(kept)} again together with the endpoint, or remove it (null, or edit --reset)",
        )


def _is_same(cipher: SecretCipher, reference: str, secret: str) -> bool:
    try:
        return cipher.decrypt(reference) == secret
    except InvalidInput:
        return False


def new_definition(options: Mapping[str, Any], push_input: PushInput, existing: Subscription | None) -> Subscription:
    """Return the definition of a new subscription; `existing` is the stored one of this name, if any.

    An option that is null or missing has its default.
    """
    given: Json = {name: value for name, value in options.items() if value is not None}
    if "push" in given:
        given["push"] = push_input.parse_new(given["push"], None if existing is None else existing.push).to_json()
    return Subscription.from_json(given)


def changed_definition(to: Subscription, options: Mapping[str, Any], push_input: PushInput) -> Subscription:
    """Return a definition with changed options: null resets one to its default, the others keep their values.

    Another delivery mode has its own order, and only push delivery keeps the push settings.
    """
    changed = to.to_json()
    if "delivery" in options and "order_by" not in options:
        changed.pop("order_by", None)
    if "delivery" in options and options["delivery"] != Delivery.PUSH.value:
        changed.pop("push", None)
    changed |= options
    if options.get("push") is not None:
        changed["push"] = push_input.parse_change(options["push"], to.push).to_json()
    return Subscription.from_json({name: value for name, value in changed.items() if value is not None})
