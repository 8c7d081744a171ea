"""The overview page and the pipeline page.

The overview shows alerts, key numbers, and the flow as a live picture. The pipeline page shows the reported state of
its parts, their batches over time, and the last error of each.
"""

import time
from typing import Any

from nicegui import ui

from purveyor.app.console import html
from purveyor.app.console.alert_groups import all_alerts
from purveyor.app.console.alerts import Level, is_silent
from purveyor.app.console.console import Console
from purveyor.app.console.flow_graph import Flow, build_flow
from purveyor.app.console.flow_svg import render_svg
from purveyor.app.console.formatting import (
    format_brief,
    format_count,
    format_duration,
    format_milliseconds,
    format_number,
    format_rate,
    format_short,
)
from purveyor.app.console.html import TableColumn
from purveyor.app.console.page_base import LiveHtml, card, page_frame
from purveyor.app.console.snapshot import PartSnapshot, PipelineSnapshot, QueueKind, SystemSnapshot, is_working
from purveyor.app.console.time_series import COLOURS, History, plot, rate_line, working_line


def install_overview(console: Console) -> None:
    """Register the page `/`."""

    @ui.page("/", title="Overview · Purveyor")
    async def overview() -> None:
        with page_frame(console, "/", "Overview", "Every change, to every subscriber, in order, once.") as page:
            alerts = LiveHtml()
            numbers = LiveHtml()
            directories = LiveHtml()
            with card("The flow", "Each arrow shows its rate, the waiting messages, and the age of the oldest one."):
                drawn, ways = LiveHtml(), LiveHtml(classes="live ways")

        def show(snapshot: SystemSnapshot) -> None:
            flow = build_flow(snapshot, console.collector.history)
            alerts.show(html.alerts(flow.alerts))
            numbers.show(key_numbers(snapshot, console.collector.history))
            directories.show(sources_table(snapshot) if snapshot.sources else "")
            drawn.show(render_svg(flow))
            ways.show(as_list(flow))

        page.on_snapshot(show)
        await page.begin()


def key_numbers(snapshot: SystemSnapshot, history: History) -> str:
    """Return the key numbers: events in, deliveries, backlog, dead letters."""
    now = snapshot.at.timestamp()
    queues = [queue for queue in snapshot.queues.values() if queue.kind is QueueKind.SUBSCRIPTION]
    into = history.of("last", "incoming").rate(now)
    out = sum(history.of("done", queue.name).rate(now) or 0.0 for queue in queues)
    waiting = sum(queue.messages for queue in queues)
    oldest = min((queue.oldest for queue in queues if queue.oldest is not None), default=None)
    incoming = snapshot.queues.get("incoming")
    return html.large_numbers(
        [
            (
                "Events in",
                format_rate(into or 0.0),
                f"{format_number(incoming.last_sequence if incoming else 0)} in total",
            ),
            ("Deliveries", format_rate(out), f"to {format_count(len(snapshot.subscriptions), 'subscription')}"),
            (
                "Backlog",
                format_number(waiting),
                f"the oldest for {format_duration((snapshot.at - oldest).total_seconds())}"
                if oldest
                else "nothing waits",
            ),
            (
                "Dead letters",
                format_number(snapshot.dead_letter_total),
                "to be handled" if snapshot.dead_letter_total else "none",
            ),
        ]
    )


def sources_table(snapshot: SystemSnapshot) -> str:
    """Return the sources that follow directories as a table."""
    heads = (
        TableColumn("Directory"),
        TableColumn("State"),
        TableColumn("Mode"),
        TableColumn("Entries", numeric=True),
        TableColumn("Last change"),
        TableColumn("Lag", numeric=True, hint="How long the last change took into the queue"),
        TableColumn("Last error", shape="prose"),
    )
    rows = []
    for source in snapshot.sources:
        values = source.values
        level = _SOURCE_STATES.get(source.state, Level.NOTE)
        lag, changed = values.get("lag_seconds"), source.last_change
        rows.append(
            (
                f"{source.source}: {values.get('base')} at {values.get('uri')}",
                html.badge(source.state, level),
                values.get("mode"),
                format_number(values["entries"]) if isinstance(values.get("entries"), int) else None,
                None
                if changed is None
                else f"{format_duration(max((snapshot.at - changed).total_seconds(), 0.0))} ago",
                format_milliseconds(int(lag * 1000)) if isinstance(lag, int | float) else None,
                source.last_error,
            )
        )
    return html.table(heads, rows, label="Directories")


def as_list(flow: Flow) -> str:
    """Return the arrows as a table, for narrow screens."""
    heads = (
        TableColumn("Arrow", shape="line"),
        TableColumn("Rate", numeric=True),
        TableColumn("Backlog", numeric=True),
        TableColumn("Oldest", numeric=True),
    )
    rows = [
        (
            html.cut(f"{flow.title(arrow.source)} → {flow.title(arrow.target)}", most=80),
            format_rate(arrow.rate),
            format_short(arrow.backlog),
            "-" if arrow.age_seconds is None else format_brief(arrow.age_seconds),
        )
        for arrow in flow.arrows
    ]
    return html.table(heads, rows, label="The flow", stays=True)


_SOURCE_STATES = {
    "following": Level.FINE,
    "refreshing": Level.FINE,
    "standby": Level.FINE,
    "failed": Level.WARNING,
    "silent": Level.WARNING,
}
_CHART_SECONDS = 10.0
_STATES = {
    "running": Level.FINE,
    "starting": Level.NOTE,
    "unresponsive": Level.STUCK,
    "waiting": Level.STUCK,
    "failed": Level.STUCK,
}
_PARTS = ("transform", "dispatch", "archive")


def install_pipeline(console: Console) -> None:
    """Register the page `/console/pipeline`."""

    @ui.page("/console/pipeline", title="Pipeline · Purveyor")
    async def pipeline() -> None:
        here = "/console/pipeline"
        with page_frame(console, here, "Pipeline", "What Spark does between the sources and the queues.") as page:
            alerts = LiveHtml()
            with card("Parts"):
                parts = LiveHtml()
            with ui.element("div").classes("split"):
                with card("Batch times", "How long a batch took; nothing while a part is idle."):
                    times = ui.echart(plot([], now=time.time())).classes("chart")
                with card("Throughput", "Messages per second that each part has processed."):
                    done = ui.echart(plot([], now=time.time())).classes("chart")
            with card("Processes"):
                processes = LiveHtml()
        plotted_at = 0.0

        def show(snapshot: SystemSnapshot) -> None:
            nonlocal plotted_at
            history, now = console.collector.history, snapshot.at.timestamp()
            about = [each for each in all_alerts(snapshot, history) if each.about.partition(":")[0] in _ABOUT]
            alerts.show(html.alerts(about, expanded=True) if about else "")
            parts.show(_parts(snapshot, history))
            processes.show(processes_table(snapshot))
            if now - plotted_at >= _CHART_SECONDS:
                plotted_at = now
                _draw(times, _times(history, now))
                _draw(done, _done(snapshot, history, now))

        page.on_snapshot(show)
        await page.begin()


_ABOUT = ("pipeline", "part", "server")


def _parts(snapshot: SystemSnapshot, history: History) -> str:
    found = snapshot.parts
    busy = {name for name in snapshot.part_readers if name in found and is_working(snapshot, history, name)}
    if not found:
        return html.empty("No pipeline has reported", "Start one with purveyor serve pipeline, or purveyor up.")
    heads = (
        TableColumn("Part"),
        TableColumn("State"),
        TableColumn("Position", numeric=True),
        TableColumn("Behind", numeric=True),
        TableColumn("Rows/s", numeric=True, hint="The speed of the last batch"),
        TableColumn("Batch", numeric=True),
        TableColumn("Batches", numeric=True, hint="The number of the last batch"),
        TableColumn("Restarts", numeric=True),
        TableColumn("Last error", shape="prose"),
    )
    rows = [
        (
            part.name,
            _state(snapshot, pipeline, part, is_idle=name not in busy),
            format_number(part.position),
            format_number(part.lag),
            format_rate(part.rows_per_second).removesuffix("/s")
            if name in busy and part.batch_ms is not None
            else None,
            format_milliseconds(part.batch_ms) if name in busy and part.batch_ms is not None else None,
            format_number(part.batch),
            format_number(part.restarts),
            part.error,
        )
        for name, (pipeline, part) in found.items()
    ]
    return html.table(heads, rows, label="Parts")


def _state(snapshot: SystemSnapshot, pipeline: PipelineSnapshot, part: PartSnapshot, *, is_idle: bool) -> html.Markup:
    if pipeline.stopped:
        return html.badge("stopped", Level.WARNING)
    if is_silent(snapshot, pipeline):
        silent = (snapshot.at - pipeline.at).total_seconds()
        return html.badge(f"silent for {format_duration(silent)}", Level.STUCK)
    if part.state == "running" and is_idle:
        return html.badge("idle")
    return html.badge(part.state, _STATES.get(part.state, Level.NOTE))


def processes_table(snapshot: SystemSnapshot) -> str:
    """Return the processes of the pipeline, with those that stand by."""
    if not snapshot.pipelines:
        return html.empty("None", "A running pipeline reports every two seconds.")
    standbys = [each for each in snapshot.standbys if not each.stopped and not is_silent(snapshot, each)]
    heads = (
        TableColumn("Process"),
        TableColumn("Group", hint="The dispatcher group. Each group gets all events"),
        TableColumn("Parts", hint="A standby runs none until it takes over"),
        TableColumn("Last report"),
        TableColumn("Spark UI"),
    )
    rows = [
        (
            f"{each.pid or '?'} on {each.host or '?'}",
            each.group or None,
            _parts_of(each),
            f"{format_duration(max((snapshot.at - each.at).total_seconds(), 0.0))} ago",
            _spark(each),
        )
        for each in (*snapshot.pipelines, *standbys)
    ]
    return html.table(heads, rows, label="Processes")


def _parts_of(each: PipelineSnapshot) -> html.Cell:
    if each.state is None:
        return ", ".join(part.name for part in each.parts)
    return html.badge("standby", Level.FINE) if each.state == "standby" else html.badge("starting, to stand by")


def _spark(each: PipelineSnapshot) -> html.Cell:
    if each.spark_ui is None or not each.spark_ui.startswith(("http://", "https://")):
        return "off; PURVEYOR_SPARK_UI=true turns it on"
    return html.Markup(
        f'<a href="{html.cell(each.spark_ui)}" target="_blank" rel="noreferrer">{html.cell(each.spark_ui)}</a>'
    )


def _times(history: History, now: float) -> dict[str, Any]:
    lines = [
        working_line(name, history.of("batch_ms", name), history.of("batch", name), now, colour)
        for name, colour in zip(_PARTS, COLOURS, strict=False)
    ]
    options = plot(lines, now=now, unit=" ms")
    for line in options["series"]:  # a single batch between two idle times is a point
        line |= {"showSymbol": True, "symbolSize": 3}
    return options


def _done(snapshot: SystemSnapshot, history: History, now: float) -> dict[str, Any]:
    readers = (("ldif", "transformer"), ("incoming", snapshot.dispatcher), ("incoming", "archive"))
    lines = [
        rate_line(name, history.of("floor", *reader), now, colour)
        for name, reader, colour in zip(_PARTS, readers, COLOURS, strict=False)
    ]
    return plot(lines, now=now, unit="/s")


def _draw(chart: ui.echart, options: dict[str, Any]) -> None:
    chart.options.clear()
    chart.options.update(options)
    chart.update()
