"""The parser of guides: an output that differs must not count as equal."""

import pytest

from tests.docs.markdown import Block, Step, blocks, matches, steps


def test_blocks_are_found_with_language_and_line() -> None:
    assert blocks("a\n```console\n$ ls\n```\n\n```python\nx = 1\n```\n") == [
        Block("console", ("$ ls",), 2),
        Block("python", ("x = 1",), 6),
    ]


def test_an_open_block_is_an_error() -> None:
    with pytest.raises(ValueError, match="line 1"):
        blocks("```console\n$ ls\n")


def test_commands_have_their_output_and_may_go_on() -> None:
    assert steps(Block("console", ("$ for i in 1 2", "> do true; done", "$ ls", "a", "b"), 10)) == [
        Step("for i in 1 2\ndo true; done", (), 11),
        Step("ls", ("a", "b"), 13),
    ]
    assert Step("serve &", (), 1).in_background


@pytest.mark.parametrize(
    ("expected", "actual", "same"),
    [
        (("a", "b"), "a\nb\n", True),
        (("a", "b"), "a\nb\nc\n", False),
        (("a", "..."), "a\nb\nc\n", True),
        (("...", "c", "..."), "a\nc\n", True),
        (("...", "c"), "a\nb\n", False),
        (("after ..., twice",), "after 12ms, twice\n", True),
        (("after ..., twice",), "after 12ms, once\n", False),
        (("at 2026-01-01 00:00:00 UTC",), "at 2031-12-31 23:59:59 UTC\n", True),
        (("at 2026-01-01 00:00:00 UTC",), "at noon\n", False),
        (("a.c",), "abc\n", False),
        ((), "", True),
        ((), "something\n", False),
    ],
)
def test_an_output_is_as_promised_or_not(expected: tuple[str, ...], actual: str, same: bool) -> None:
    assert matches(expected, actual) is same
