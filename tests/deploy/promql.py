"""Analyse Prometheus queries: the series that a query reads, and the labels of its result.

Parsed by the grammar of Prometheus itself (in Rust, by `promql-parser`), so that a bracket, a function or the type of
an argument that is wrong is found here and not by the server that is to load it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import promql_parser as promql

METRICS_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
OF_SCRAPE = frozenset({"instance", "job"})
"""Labels that Prometheus adds to every series."""
_ROW = re.compile(r"^\| `(purveyor_[a-z_]+)` \| (counter|gauge|histogram) \| ([^|]*) \|", re.MULTILINE)
_OF_COUNTERS = {"rate", "irate", "increase"}
_OF_GAUGES = {"delta", "idelta", "deriv"}
_KEEP_LABELS = {"topk", "bottomk", "limitk"}
_NO_LABELS = {"vector", "scalar", "time"}


@dataclass(frozen=True)
class Metric:
    """A documented series."""

    kind: str
    labels: frozenset[str]


def documented() -> dict[str, Metric]:
    """Return all documented series by name; a histogram has three."""
    found = {"up": Metric("gauge", OF_SCRAPE)}
    for name, kind, reported in _ROW.findall(METRICS_PAGE.read_text()):
        labels = frozenset(re.findall(r"`([a-z_]+)`", reported)) | OF_SCRAPE
        if kind != "histogram":
            found[name] = Metric(kind, labels)
            continue
        found |= {f"{name}_{end}": Metric("counter", labels) for end in ("sum", "count")}
        found[f"{name}_bucket"] = Metric("counter", labels | {"le"})
    return found


KNOWN = documented()


def check(query: str, where: str) -> frozenset[str]:
    """Parse a query, compare it with the documentation, and return the labels of its result."""
    try:
        tree = promql.parse(query)
    except ValueError as error:
        raise AssertionError(f"{where}: {error}: {query}") from None
    for selector in selectors(tree):
        assert selector.name in KNOWN, f"{where}: there is no metric {selector.name}"
        picked = {each.name for each in selector.matchers.matchers}
        assert picked <= KNOWN[selector.name].labels, f"{where}: {selector} picks by a label that it has not"
    return _labels(tree, where)


def series(query: str) -> set[str]:
    """Return the names of the series that a query reads."""
    return {each.name for each in selectors(promql.parse(query)) if each.name is not None}


def selectors(tree: promql.Expr) -> Iterator[promql.VectorSelector]:
    """Yield every selector of a query, also those in ranges."""
    found: list[promql.VectorSelector] = []

    def look(node: promql.Expr) -> None:
        if isinstance(node, promql.VectorSelector):
            found.append(node)

    promql.walk(tree, look)
    return iter(found)


def _labels(node: promql.Expr, where: str) -> frozenset[str]:
    """Return the labels of a result; require rate or increase for counters, which can be reset."""
    match node:
        case promql.VectorSelector():
            assert node.name is not None
            assert KNOWN[node.name].kind == "gauge", f"{where}: {node.name} counts: take its rate"
            return KNOWN[node.name].labels
        case promql.AggregateExpr():
            inner = _labels(node.expr, where)
            grouped = frozenset(node.modifier.labels if node.modifier is not None else ())
            assert grouped <= inner, f"{where}: {set(grouped - inner)} is no label there"
            if node.modifier is not None and node.modifier.type == promql.AggModifierType.Without:
                return inner - grouped
            return inner if node.modifier is None and str(node.op) in _KEEP_LABELS else grouped
        case promql.Call():
            return _labels_of_call(node, where)
        case promql.BinaryExpr():
            left, right = _labels(node.lhs, where), _labels(node.rhs, where)
            if str(node.op) in ("or", "and", "unless") or not (left and right):
                return left | right
            assert left == right or node.modifier is not None, f"{where}: {set(left ^ right)} is on one side only"
            return left & right
        case promql.ParenExpr() | promql.UnaryExpr():
            return _labels(node.expr, where)
        case promql.NumberLiteral() | promql.StringLiteral():
            return frozenset()
        case _:
            raise AssertionError(f"{where}: no rule for {type(node).__name__}")


def _labels_of_call(node: promql.Call, where: str) -> frozenset[str]:
    name = node.func.name
    if name in _NO_LABELS:
        return frozenset()
    ranges = [each for each in node.args if isinstance(each, promql.MatrixSelector)]
    for each in ranges:
        metric = each.vector_selector.name
        assert metric is not None
        wanted = {"counter": _OF_COUNTERS, "gauge": _OF_GAUGES}[KNOWN[metric].kind]
        assert name in wanted, f"{where}: {name} of {metric}, which is a {KNOWN[metric].kind}"
        return KNOWN[metric].labels
    inner = frozenset[str]().union(*(_labels(each, where) for each in node.args))
    if name == "histogram_quantile":
        assert "le" in inner, f"{where}: a quantile of what has no buckets"
        return inner - {"le"}
    return inner
