"""Groups of commands: the other names of a command, and what to suggest for a name that does not exist.

`ls` and `list`, `info` and `show`, `rm`, `remove` and `delete` are the same in every group. The help lists a command
once, by its own name.

`purveyor --help` imports this module: nothing here may import Rich or a client library.
"""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from typer.core import TyperGroup

_LIST: Final = ("list", "ls")
_SHOW: Final = ("show", "info")
_DELETE: Final = ("delete", "rm", "remove", "discard")
ALIASES: Final[Mapping[str, Sequence[str]]] = {
    "list": _LIST,
    "ls": _LIST,
    "show": _SHOW,
    "info": _SHOW,
    "delete": _DELETE,
    "rm": _DELETE,
    "remove": _DELETE,
}
"""For each name the commands that it may mean; a group has one of them."""
_ADD: Final = ("add", "publish")
_EDIT: Final = ("edit", "password")
_MEANINGS: Final[Mapping[str, Sequence[str]]] = {
    **dict.fromkeys(("create", "new", "make", "register"), _ADD),
    **dict.fromkeys(("change", "modify", "update", "set", "patch"), _EDIT),
    **dict.fromkeys(("get", "view", "describe", "status", "details"), _SHOW),
    **dict.fromkeys(("drop", "destroy", "del", "erase"), _DELETE),
    **dict.fromkeys(("stop", "suspend", "disable"), ("pause",)),
    **dict.fromkeys(("start", "continue", "enable", "unpause"), ("resume", "up")),
    **dict.fromkeys(("redrive", "requeue"), ("retry",)),
    **dict.fromkeys(("send", "emit"), ("publish", "pub")),
    **dict.fromkeys(("pull", "consume", "receive"), ("next",)),
    **dict.fromkeys(("run",), ("up", "serve")),
}
"""Words for what a command does that are no name of it."""
_MOST_SUGGESTIONS: Final = 3
_MIN_SIMILARITY: Final = 0.7
"""At the default of `difflib`, 0.6, `remove` is similar to `resume`."""


def command_of(name: str, commands: Sequence[str]) -> str | None:
    """Return the command of a group that a name means; None if there is none.

    >>> command_of("rm", ["add", "delete"]), command_of("rm", ["add", "rm"]), command_of("rm", ["add"])
    ('delete', 'rm', None)
    """
    if name in commands:
        return name
    return next((each for each in ALIASES.get(name, ()) if each in commands), None)


def suggestions(name: str, commands: Sequence[str]) -> list[str]:
    """Return the commands of a group that a user may have meant, the likeliest first.

    >>> suggestions("create", ["add", "edit"]), suggestions("remove", ["resume"]), suggestions("resum", ["resume"])
    (['add'], [], ['resume'])
    """
    word = name.lower()
    meant = [each for each in (word, *_MEANINGS.get(word, ())) if each in commands][:1]
    if meant:
        return meant
    near = difflib.get_close_matches(word, commands, n=_MOST_SUGGESTIONS, cutoff=_MIN_SIMILARITY)
    if near:
        return near
    aliases = {alias: found for alias in ALIASES if (found := command_of(alias, commands)) is not None}
    return [aliases[each] for each in difflib.get_close_matches(word, aliases, n=1, cutoff=_MIN_SIMILARITY)]


class CommandGroup(TyperGroup):
    """A group whose commands have aliases."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by its name or an alias."""
        found = command_of(cmd_name, self.list_commands(ctx))
        return None if found is None else super().get_command(ctx, found)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command and its own name; if there is none, fail with what the user may have meant."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-") and not ctx.resilient_parsing:
            near = " or ".join(repr(each) for each in suggestions(name, self.list_commands(ctx)))
            ctx.fail(f"No such command {name!r}." + (f" Did you mean {near}?" if near else ""))
        found, command, rest = super().resolve_command(ctx, args)
        return command.name if command is not None else found, command, rest
