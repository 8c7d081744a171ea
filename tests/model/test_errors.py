"""Errors say what to do, can be pickled, and are retryable or permanent by type."""

import pickle

import pytest

from purveyor.model import errors


def all_errors() -> list[type[errors.PurveyorError]]:
    found, todo = [], [errors.PurveyorError]
    while todo:
        kind = todo.pop()
        found.append(kind)
        todo += [below for below in kind.__subclasses__() if below.__module__ == errors.__name__]
    return found


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
def test_every_error_survives_the_way_from_an_executor(kind: type[errors.PurveyorError]) -> None:
    error = kind("it broke", fix="mend it")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert str(back) == "it broke (mend it)"
    assert back.__dict__ == error.__dict__


def test_only_what_is_unavailable_or_was_planned_too_early_is_worth_another_try() -> None:
    retryable = {kind for kind in all_errors() if kind.retryable}
    unavailable = {errors.Unavailable, errors.ServerUnavailable, errors.NoAnswer, errors.QueueMigrating}
    assert retryable == unavailable | {errors.WindowFull, errors.PlanOutdated}


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = {word for word in (errors.__doc__ or "").replace("─", " ").split() if word.isidentifier()}
    assert {kind.__name__ for kind in all_errors()} <= drawn
