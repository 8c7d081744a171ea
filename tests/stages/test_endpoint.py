"""The delays of a retry, and the number of messages that share a transaction."""

from datetime import timedelta

import pytest

from purveyor.model.errors import InvalidConfig
from purveyor.stages import Retry
from purveyor.stages.endpoint import Timing
from purveyor.stages.processor import GroupSize


def test_delays_grow_and_end() -> None:
    retry = Retry.in_order()
    delays = [retry.after(failures) for failures in range(1, 8)]
    assert [delay.total_seconds() for delay in delays if delay] == [0.5, 1, 2, 4, 8, 16]
    assert delays[-1] is None
    assert not retry.is_exhausted(37)
    assert retry.is_exhausted(38)
    with pytest.raises(InvalidConfig):
        Retry.parallel(attempts=0)
    with pytest.raises(InvalidConfig, match="inbox"):
        Timing(inbox_kept=timedelta(days=1))


def test_groups_grow_with_fast_handlers_and_shrink_with_slow_ones() -> None:
    group_size = GroupSize()
    for _ in range(10):
        group_size.record(0.001 * group_size.limit, group_size.limit, truncated=False)
    assert group_size.limit == 128
    group_size.record(0.5, 3, truncated=True)
    assert group_size.limit == 3
    group_size.reset()
    assert group_size.limit == 1
