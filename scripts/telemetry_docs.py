"""The generated pages about watching and deploying: the list of metrics, and the NATS users of the parts."""

from pathlib import Path

from purveyor.app.cli.queues import password_variable
from purveyor.app.telemetry.metric_catalogue import LOOKED_UP, all_metrics
from purveyor.jetstream.server.config import render_users
from purveyor.model.metrics import INSTRUMENTS, MetricInfo, Histogram
from purveyor.queues.permissions import component_users

METRICS_PAGE = Path("docs/reference/metrics.md")
USERS_FILES = (Path("deploy/nats/users.conf"), Path("deploy/kubernetes/users.conf"))

_HEAD = """\
# Metrics

<!-- Made by `make docs` from src/purveyor/model/metrics.py and src/purveyor/app/telemetry/metric_catalogue.py. -->

What Prometheus reads: of the API at `/metrics`, of `serve pipeline`, `serve push` and applications with stages at the
port in `PURVEYOR_METRICS_PORT`. Counters begin at 0 with each process; `rate` and `increase` know that. The figures of
queues and subscriptions are told by every API alike: take `max by (queue)` of them, not the sum. Beside these there are
`process_*` (CPU, memory, open files) of each process. See [telemetry](../guides/telemetry.md).

"""
_TITLES = (
    ("Looked up when Prometheus asks", frozenset(metric.name for metric in LOOKED_UP)),
    ("Counted by the parts while they work", frozenset(instrument.info.name for instrument in INSTRUMENTS)),
)


def metrics_page() -> str:
    """Every metric by name."""
    bounds = {instrument.info.name: instrument.bounds for instrument in INSTRUMENTS if isinstance(instrument, Histogram)}
    parts = [_HEAD]
    for title, names in _TITLES:
        rows = ["| metric | kind | labels | what it tells |", "|---|---|---|---|"]
        rows += [_row(metric) for metric in all_metrics() if metric.name in names]
        parts.append(f"## {title}\n\n" + "\n".join(rows) + "\n\n")
    told = ", ".join(f"{bound:g}" for bound in next(iter(bounds.values())))
    parts.append(f"A histogram has the series `_bucket`, `_sum` and `_count`, with bounds at {told} seconds.\n")
    return "".join(parts)


def _row(metric: MetricInfo) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels) or "-"
    return f"| `{metric.name}` | {metric.kind.value} | {labels} | {metric.help} |"


def users_file() -> str:
    """The users of a NATS server that is not the embedded one: the parts, and one for people that may do everything."""
    passwords = {each.user: f"${password_variable(each.user)}" for each in component_users()}
    inside = [
        "# for people and the command line: may do everything",
        f'{{ user: "admin", password: ${password_variable("admin")} }}',
        *render_users(component_users(), passwords).splitlines(),
    ]
    lines = "\n".join(f"    {line}" for line in inside)
    head = "# Made by `make docs` from src/purveyor/queues/permissions.py."
    return f"{head}\nauthorization {{\n  users: [\n{lines}\n  ]\n}}\n"


def telemetry_pages() -> dict[Path, str]:
    """Each page with its text."""
    return {METRICS_PAGE: metrics_page(), **dict.fromkeys(USERS_FILES, users_file())}
