"""Users of a NATS server, the subjects that each may publish and subscribe to, and the configuration text for them."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from purveyor.jetstream.address import DEFAULT_INBOX


@dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
    """A user and what it may do. What is denied is denied, whatever else allows it."""

    user: str
    purpose: str
    publish: tuple[str, ...]
    publish_denied: tuple[str, ...] = ()
    listen: tuple[str, ...] = ()
    """What it hears beside its inbox."""

    @property
    def inbox(self) -> str:
        """How the subjects begin on which it gets its answers."""
        return f"{DEFAULT_INBOX}.{self.user}"

    @property
    def subscribe(self) -> tuple[str, ...]:
        """All that it hears."""
        return (f"{self.inbox}.>", *self.listen)

    def to_json(self) -> dict[str, object]:
        """For programs."""
        return {
            "user": self.user,
            "purpose": self.purpose,
            "inbox": self.inbox,
            "publish": {"allow": list(self.publish), "deny": list(self.publish_denied)},
            "subscribe": {"allow": list(self.subscribe)},
        }


def render_users(users: Iterable[Permissions], passwords: Mapping[str, str]) -> str:
    """Users as the server's configuration has them, for the list `users` of `authorization`.

    `passwords` are texts of that configuration: quoted, or a `$VARIABLE`.
    """
    lines: list[str] = []
    for each in users:
        lines += [
            f"# {each.purpose}; answers come to {each.inbox}",
            f"{{ user: {_quoted(each.user)}, password: {passwords[each.user]}, permissions: {{",
            *_list("publish", each.publish, each.publish_denied),
            *_list("subscribe", each.subscribe),
            "} }",
        ]
    return "\n".join(lines)


def _list(what: str, allowed: Iterable[str], denied: Iterable[str] = ()) -> list[str]:
    lines = [f"  {what}: {{"]
    for key, subjects in (("allow", tuple(allowed)), ("deny", tuple(denied))):
        if subjects:
            lines += [f"    {key}: [", *(f"      {_quoted(subject)}" for subject in subjects), "    ]"]
    return [*lines, "  }"]


def _quoted(text: str) -> str:
    return json.dumps(text)
