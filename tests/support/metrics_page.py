"""Read a page of Prometheus metrics."""

import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families


class MetricsPage:
    """The series of a page, by name and labels."""

    def __init__(self, text: str) -> None:
        found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        self._values = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in found}
        self.labels = {value for sample in found for value in sample.labels.values()}

    def get(self, name: str, **labels: str) -> float | None:
        return self._values.get((f"purveyor_{name}", frozenset(labels.items())))

    def since(self, before: "MetricsPage", name: str, **labels: str) -> float:
        return (self.get(name, **labels) or 0) - (before.get(name, **labels) or 0)


HOST = "127.0.0.1"


def fetch(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://{HOST}:{port}{path}", timeout=60) as answer:
        text: str = answer.read().decode()
        return text


def answers(port: int) -> bool:
    try:
        fetch(port)
    except OSError:
        return False
    return True
