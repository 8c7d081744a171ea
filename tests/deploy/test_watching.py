"""Alert rules and the dashboard: every query parses, and reads only documented metrics."""

import json
import re
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml  # type: ignore[import-untyped]  # it ships no types

from purveyor.app.telemetry.metric_catalogue import all_metrics, sample_names
from tests.deploy import alerting, promql, schemas
from tests.support.deployment import DEPLOY, check_command, valid

RULES = DEPLOY / "prometheus" / "rules.yml"
BOARD = DEPLOY / "grafana" / "purveyor.json"
CASES = Path(__file__).parent / "alerts.yml"
EVERY_SECONDS = 60.0  # `evaluation_interval` of the cases


def alerts() -> list[dict[str, Any]]:
    rules = yaml.safe_load(RULES.read_text())
    return [rule for group in rules["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(BOARD.read_text())["panels"] if panel["type"] != "row"]


def test_the_page_of_metrics_has_every_series() -> None:
    there = {sample for figure in all_metrics() for sample in sample_names(figure)}
    assert set(promql.KNOWN) - {"up"} == there


@pytest.mark.parametrize(
    ("query", "wrong"),
    [
        ("sum by (queue (purveyor_queue_messages)", "invalid|unclosed|unexpected"),
        ("rate(purveyor_messages_delivered_total)", "expected type matrix"),
        ("purveyor_no_such_thing > 1", "no metric"),
        ("rate(purveyor_queue_messages[5m])", "which is a gauge"),
        ("purveyor_messages_delivered_total > 5", "take its rate"),
        ("max by (part) (purveyor_queue_messages)", "no label"),
        ('purveyor_queue_messages{part="x"}', "has not"),
        ("max by (queue) (purveyor_queue_messages) > purveyor_nats_up", "one side only"),
    ],
)
def test_a_query_that_is_wrong_is_found(query: str, wrong: str) -> None:
    with pytest.raises(AssertionError, match=wrong):
        promql.check(query, "a rule")


def test_the_alerts_are_about_metrics_that_exist() -> None:
    valid(schemas.RULES, yaml.safe_load(RULES.read_text()), "rules.yml")
    assert len({rule["alert"] for rule in alerts()}) == len(alerts())
    for rule in alerts():
        labels = promql.check(rule["expr"], rule["alert"])
        reported = " ".join(rule["annotations"].values())
        assert set(re.findall(r"\$labels\.([a-z_]+)", reported)) <= labels, rule["alert"]
        for command in re.findall(r"`(purveyor [^`]*)`", reported):
            words = [word for word in command.split()[1:] if word.islower()]
            check_command(words[:2], rule["alert"])


def test_prometheus_loads_the_rules_and_asks_the_parts_of_the_compose_file() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    assert config["rule_files"] == [RULES.name]
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    targets = [
        target for job in config["scrape_configs"] for each in job["static_configs"] for target in each["targets"]
    ]
    assert {target.partition(":")[0] for target in targets} <= set(compose["services"])


def test_every_alert_has_a_case_in_which_it_comes_and_one_in_which_it_does_not() -> None:
    cases = yaml.safe_load(CASES.read_text())["tests"]
    asked = [each for case in cases for each in case["alert_rule_test"]]
    for rule in alerts():
        of_this = [bool(each["exp_alerts"]) for each in asked if each["alertname"] == rule["alert"]]
        assert {True, False} <= set(of_this), rule["alert"]


@pytest.mark.parametrize("case", yaml.safe_load(CASES.read_text())["tests"])
def test_the_alerts_come_when_they_should(case: dict[str, Any]) -> None:
    interval = alerting.seconds(case["interval"])
    store = alerting.Store([alerting.read_series(each, interval) for each in case["input_series"]])
    rules = {rule["alert"]: rule for rule in alerts()}
    for asked in case["alert_rule_test"]:
        found = alerting.firing(rules[asked["alertname"]], store, alerting.seconds(asked["eval_time"]), EVERY_SECONDS)
        wanted = {
            alerting.Alert(frozenset(each["exp_labels"].items()), frozenset(each["exp_annotations"].items()))
            for each in asked["exp_alerts"]
        }
        assert set(found) == wanted, f"{asked['alertname']} at {asked['eval_time']}"


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("max by (a) (x)", {"1": 7, "2": 9}),
        ("sum by (a) (x) > 10", {"1": 12}),
        ("0.5 * min by (a) (x)", {"1": 2.5, "2": 4.5}),
        ('max by (a) (x{b!="q", a=~"1|3"})', {"1": 7}),
        ("max by (a) (x) - max by (a) (x offset 2m)", {"1": 2}),
        ("max by (a) (x offset 10m) or 0 * max by (a) (x)", {"1": 0, "2": 0}),
        ("sum by (a) (increase(counted[200s]))", {"1": 34.4444444}),
        ("sum by (a) (rate(counted[200s]))", {"1": 0.1722222222}),
        ("sum by (a) (increase(late[250s]))", {"1": 9}),
        ("max by (a) (too_old)", {}),
    ],
)
def test_queries_mean_what_they_mean_to_prometheus(query: str, expected: dict[str, float]) -> None:
    """The expected results are what promtool 2.42 gave."""
    given = {
        'x{a="1", b="p"}': "0 0 0 0 0 5 6 7",
        'x{a="1", b="q"}': "_ _ _ _ _ _ _ 5",
        'x{a="2", b="q"}': "_ _ _ _ _ _ _ 9",
        'counted{a="1"}': "0 10 20 30 40 50 10 21",
        'late{a="1"}': "_ _ _ _ _ 1 5 9",
        'too_old{a="1"}': "3 _ _ _ _ _ _ _",
    }
    store = alerting.Store([alerting.read_series({"series": k, "values": v}, 60) for k, v in given.items()])
    found = store.ask(promql_parser.parse(query), 7 * 60)
    assert isinstance(found, dict)
    assert {dict(labels)["a"]: value for labels, value in found.items()} == pytest.approx(expected)


def test_the_dashboard_shows_metrics_that_exist() -> None:
    board = json.loads(BOARD.read_text())
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in panels():
        assert panel["title"]
        assert panel["description"]
        assert panel["datasource"]["uid"] == "${source}"
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for target in panel["targets"]:
            labels = promql.check(target["expr"], panel["title"])
            assert set(re.findall(r"\{\{([a-z_]+)\}\}", target["legendFormat"])) <= labels, panel["title"]
    (variable,) = board["templating"]["list"]
    assert variable["name"] == "source"


def test_every_figure_is_shown_or_known_to_be_left_out() -> None:
    """A new metric is on the dashboard, or in the list here."""
    shown = {name for panel in panels() for target in panel["targets"] for name in promql.series(target["expr"])}
    left_out = {figure.name for figure in all_metrics() if not shown & set(sample_names(figure))}
    assert left_out <= {
        "purveyor_build_info",
        "purveyor_database_up",
        "purveyor_events_published_total",
        "purveyor_messages_expired_total",
        "purveyor_nats_up",
        "purveyor_process_up",
        "purveyor_push_breaker_open",
        "purveyor_push_failed_attempts",
        "purveyor_push_last_status",
        "purveyor_source_info",
        "purveyor_source_last_change_timestamp_seconds",
        "purveyor_source_last_error_timestamp_seconds",
        "purveyor_subscription_prefill_failed",
        "purveyor_subscription_unreadable",
        "purveyor_subscriptions",
    }
