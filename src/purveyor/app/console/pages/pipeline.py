"""Pipeline: its parts as they report themselves, their batches over time, and the last error of each."""

import time
from typing import Any

from nicegui import ui

from purveyor.app.console import html
from purveyor.app.console.alerts import SILENT_SECONDS, Level
from purveyor.app.console.charts import COLOURS, as_is, as_rate, plot
from purveyor.app.console.console import Console
from purveyor.app.console.flow_graph import all_troubles
from purveyor.app.console.formatting import duration, number, rate
from purveyor.app.console.html import Head
from purveyor.app.console.page_base import Live, card, page_frame
from purveyor.app.console.snapshot import Facts, PartFacts, PipelineFacts
from purveyor.app.console.time_series import History

_CHART_SECONDS = 10.0
_STATES = {"running": Level.FINE, "starting": Level.NOTE, "waiting": Level.STUCK, "failed": Level.STUCK}
_PARTS = ("transform", "dispatch", "archive")


def install(console: Console) -> None:
    """Make it known."""

    @ui.page("/console/pipeline", title="Pipeline · Purveyor")
    async def pipeline() -> None:
        here = "/console/pipeline"
        with page_frame(console, here, "Pipeline", "What Spark does between the sources and the queues.") as page:
            troubles = Live()
            with card("Parts"):
                parts = Live()
            with ui.element("div").classes("split"):
                with card("Batch times", "How long a batch took, in milliseconds."):
                    times = ui.echart(plot([], now=time.time())).classes("chart")
                with card("Throughput", "Messages done in a second, by the place of each reader."):
                    done = ui.echart(plot([], now=time.time())).classes("chart")
            with card("Processes"):
                processes = Live()
        plotted_at = 0.0

        def show(facts: Facts) -> None:
            nonlocal plotted_at
            history, now = console.gatherer.history, facts.at.timestamp()
            about = [each for each in all_troubles(facts, history) if each.about.partition(":")[0] in _ABOUT]
            troubles.show(html.troubles(about) if about else "")
            parts.show(_parts(facts))
            processes.show(_processes(facts))
            if now - plotted_at >= _CHART_SECONDS:
                plotted_at = now
                _draw(times, _times(history, now))
                _draw(done, _done(facts, history, now))

        page.on_facts(show)
        await page.begin()


_ABOUT = ("pipeline", "part", "server")


def _parts(facts: Facts) -> str:
    found = facts.parts
    if not found:
        return html.empty("No pipeline has reported", "Start one with purveyor serve pipeline, or purveyor up.")
    heads = (
        Head("Part"),
        Head("State"),
        Head("Position", numeric=True),
        Head("Behind", numeric=True),
        Head("Rows/s", numeric=True, hint="How fast the last batch went"),
        Head("Batch", numeric=True),
        Head("Batches", numeric=True, hint="The number of the last batch"),
        Head("Restarts", numeric=True),
        Head("Last error"),
    )
    rows = [
        (
            part.name,
            _state(facts, pipeline, part),
            number(part.position),
            number(part.lag),
            rate(part.rows_per_second).removesuffix("/s") if part.batch_ms is not None else None,
            None if part.batch_ms is None else f"{number(part.batch_ms)} ms",
            number(part.batch),
            number(part.restarts),
            part.error,
        )
        for pipeline, part in found.values()
    ]
    return html.table(heads, rows, label="Parts")


def _state(facts: Facts, pipeline: PipelineFacts, part: PartFacts) -> html.Markup:
    silent = (facts.at - pipeline.at).total_seconds()
    if pipeline.stopped:
        return html.badge("stopped", Level.WARNING)
    if silent > SILENT_SECONDS:
        return html.badge(f"silent for {duration(silent)}", Level.STUCK)
    return html.badge(part.state, _STATES.get(part.state, Level.NOTE))


def _processes(facts: Facts) -> str:
    if not facts.pipelines:
        return html.empty("None", "A pipeline that runs says so every two seconds.")
    heads = (
        Head("Process"),
        Head("Group", hint="The dispatcher group: each gets all events"),
        Head("Parts"),
        Head("Heard of"),
        Head("Spark UI"),
    )
    rows = [
        (
            f"{each.pid or '?'} on {each.host or '?'}",
            each.group or None,
            ", ".join(part.name for part in each.parts),
            f"{duration(max((facts.at - each.at).total_seconds(), 0.0))} ago",
            _spark(each),
        )
        for each in facts.pipelines
    ]
    return html.table(heads, rows, label="Processes")


def _spark(each: PipelineFacts) -> html.Cell:
    if each.spark_ui is None or not each.spark_ui.startswith(("http://", "https://")):
        return "off; PURVEYOR_SPARK_UI=true turns it on"
    return html.Markup(
        f'<a href="{html.cell(each.spark_ui)}" target="_blank" rel="noreferrer">{html.cell(each.spark_ui)}</a>'
    )


def _times(history: History, now: float) -> dict[str, Any]:
    lines = [
        as_is(name, history.of("batch_ms", name), now, colour) for name, colour in zip(_PARTS, COLOURS, strict=False)
    ]
    return plot(lines, now=now, unit=" ms")


def _done(facts: Facts, history: History, now: float) -> dict[str, Any]:
    readers = (("ldif", "transformer"), ("incoming", facts.dispatcher), ("incoming", "archive"))
    lines = [
        as_rate(name, history.of("floor", *reader), now, colour)
        for name, reader, colour in zip(_PARTS, readers, COLOURS, strict=False)
    ]
    return plot(lines, now=now, unit="/s")


def _draw(chart: ui.echart, options: dict[str, Any]) -> None:
    chart.options.clear()
    chart.options.update(options)
    chart.update()
