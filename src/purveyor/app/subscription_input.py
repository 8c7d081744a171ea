"""Build the definition of a subscription from the options that a user gives: in a request, or as flags of a command.

Options have the names and the form of the HTTP API on every surface, with secrets in clear. `Subscription.from_json`
checks the rules, `PushInput` checks the endpoints and encrypts the secrets.
"""

from collections.abc import Mapping
from typing import Any

from purveyor.app.push_input import PushInput
from purveyor.model.delivery_policy import Delivery
from purveyor.model.json_fields import Json
from purveyor.model.subscription import Subscription


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
