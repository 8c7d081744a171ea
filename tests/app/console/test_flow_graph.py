"""The overview draws each queue, part and subscription with its rate, what waits, and the age of the oldest message."""

import itertools
import re
from dataclasses import replace
from datetime import timedelta

import pytest

from purveyor.app.console.alerts import Level
from purveyor.app.console.flow_graph import MAX_SUBSCRIPTIONS, build_flow, oldest_age
from purveyor.app.console.flow_svg import fit, render_svg, text_width
from purveyor.app.console.html import alerts as as_html
from purveyor.app.console.snapshot import QueueKind, QueueSnapshot, ReaderSnapshot, recorded_numbers
from purveyor.app.console.time_series import History
from purveyor.model.registration import DispatchState, Suspension
from tests.app.console.sample_systems import (
    NOW,
    PARTS,
    PIPELINE,
    flow_of,
    registered,
    sample_system,
    unreadable,
    waiting,
)


def test_all_is_well() -> None:
    flow = flow_of(sample_system())
    assert flow.alerts == ()
    assert flow.level is Level.FINE
    assert {box.title for box in flow.boxes} >= {
        "Directory",
        "Publishers",
        "incoming",
        "dispatch",
        "ox",
        "Dead letters",
    }
    assert "All is well" in as_html(flow.alerts)


def test_the_age_on_an_arrow_is_that_of_what_its_own_reader_has_not_done() -> None:
    history = History()
    for second, last in ((0, 0), (100, 10), (200, 20), (300, 30)):
        history.add(NOW.timestamp() - 300 + second, {("last", "incoming"): last})
    queues = {**sample_system().queues, "incoming": waiting("incoming", 30, 290, last_sequence=30)}
    quick, slow = (
        ReaderSnapshot(durable="dispatcher", ack_floor=20, pending=10),
        ReaderSnapshot(durable="archive", pending=30),
    )
    snapshot = sample_system(queues=queues, readers={**sample_system().readers, "incoming": (quick, slow)})
    age = oldest_age(snapshot, history, "incoming", "dispatcher")
    assert age is not None
    assert age <= 100
    assert oldest_age(snapshot, history, "incoming", "archive") == pytest.approx(290)


def test_of_a_thousand_subscriptions_those_in_need_are_drawn() -> None:
    queues = {f"s{n}": QueueSnapshot(name=f"s{n}", kind=QueueKind.SUBSCRIPTION, messages=n % 50) for n in range(1000)}
    suspended = DispatchState(incarnation="i", next=9, suspended=Suspension(position=9, reason="full", at=NOW))
    subscriptions = {name: registered(name) for name in queues} | {"s7": registered("s7", dispatch=suspended)}
    flow = flow_of(sample_system(queues={**sample_system().queues, **queues}, subscriptions=subscriptions))
    assert "sub:s7" in {box.id for box in flow.boxes}
    assert sum(box.id.startswith("sub:") for box in flow.boxes) == MAX_SUBSCRIPTIONS
    assert flow.hidden == 1002 - MAX_SUBSCRIPTIONS
    assert f"and {flow.hidden} more" in render_svg(flow)


def test_nothing_that_comes_from_outside_becomes_markup() -> None:
    evil = '<img src=x onerror="alert(1)">'
    silent = replace(PIPELINE, host=evil, at=NOW - timedelta(days=1))
    flow = flow_of(sample_system(unreadable={evil: unreadable(evil)}, pipelines=(silent,)))
    assert "<img" not in as_html(flow.alerts) + render_svg(flow)


def test_an_idle_part_shows_no_batch_time() -> None:
    def note(*batches: int, pending: int = 0) -> str:
        history = History()
        for number, batch in enumerate(batches):
            parts = tuple(replace(part, batch=batch, batch_ms=4068) for part in PARTS)
            readers = {**sample_system().readers, "ldif": (ReaderSnapshot(durable="transformer", pending=pending),)}
            snapshot = sample_system(pipelines=(replace(PIPELINE, parts=parts),), readers=readers)
            history.add(NOW.timestamp() - 4 * (len(batches) - number), recorded_numbers(snapshot))
        return next(box.note for box in build_flow(snapshot, history).boxes if box.id == "part:transform")

    assert note(7, 7, 7) == "idle"
    assert note(7, 8, 9) == "4.1 s a batch"
    assert note(7, 7, 7, pending=3) == "4.1 s a batch"  # this batch takes long


def test_the_labels_of_the_arrows_keep_their_distance() -> None:
    drawn = render_svg(flow_of(sample_system()))
    label = re.compile(
        r'class="label" transform="translate\((\S+) (\S+)\)">.*?<rect x="\S+" y="\S+" width="(\S+)" height="(\S+)"'
    )
    found = [tuple(map(float, match)) for match in label.findall(drawn)]
    assert len(found) >= 7
    for (x1, y1, width1, height1), (x2, y2, width2, height2) in itertools.combinations(found, 2):
        apart = max(abs(x1 - x2) - (width1 + width2) / 2, abs(y1 - y2) - (height1 + height2) / 2)
        assert apart >= 10


def test_a_long_name_is_cut_to_its_box_and_keeps_its_end() -> None:
    name = "W" * 40 + "-europe-west"
    queues = {name: QueueSnapshot(name=name, kind=QueueKind.SUBSCRIPTION)}
    drawn = render_svg(
        flow_of(sample_system(queues={**sample_system().queues, **queues}, subscriptions={name: registered(name)}))
    )
    assert f"<title>{name}</title>" in drawn
    assert f">{name}<" not in drawn.replace(f"<title>{name}</title>", "")
    assert text_width(fit(name, 12)) <= 12
    assert fit(name, 12).endswith("…est")
