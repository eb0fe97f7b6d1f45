"""The Grafana dashboard and /metrics name the same metrics and labels."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import tiny_tokenizer
from live_server import failure_of, live_server, message
from scraping import Scrape, scrape

DASHBOARD = Path(__file__).resolve().parents[2] / "tools" / "grafana_dashboard.json"
METRIC = re.compile(r"\b(?:tandem|process)_\w+")
SELECTOR = re.compile(r"\b((?:tandem|process)_\w+)\{([^}]*)\}")
LABEL = re.compile(r"(\w+)\s*=")
GROUPING = re.compile(r"\b(?:by|on)\s*\(([\w, ]*)\)")
SCRAPERS_LABELS = {"instance"}
"""What Prometheus adds to what it scrapes."""
ROWS = [
    "Traffic",
    "Latency",
    "Queue, slots and pages",
    "Speculation",
    "Errors and rejections",
    "Process",
]


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text())


@pytest.fixture(scope="module")
def expressions(dashboard) -> list[str]:
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return [*found, *variable_queries(dashboard)]


def variable_queries(dashboard: dict[str, Any]) -> list[str]:
    variables = dashboard["templating"]["list"]
    return [each["query"]["query"] for each in variables if each["type"] == "query"]


@pytest.fixture
async def shown(tmp_path) -> Scrape:
    """A scrape in which every metric has samples."""
    checkpoint = tiny_tokenizer.write_checkpoint(tmp_path)
    async with live_server(checkpoint, metrics_port=0, warm=False) as live:
        await failure_of(live.inference.Generate(message()))
        await live.server.serve(live.executor)
        await live.inference.Complete(message())
        return await scrape(live)


async def test_every_metric_of_the_dashboard_exists(expressions, shown):
    assert len(expressions) > 30
    for expression in expressions:
        names = METRIC.findall(expression)
        assert names, f"{expression} names no metric"
        assert set(names) <= shown.names, expression


async def test_every_metric_of_ours_is_on_the_dashboard(expressions, shown):
    on_it = {name for expression in expressions for name in METRIC.findall(expression)}
    ours = [family for family in shown.families if family.name.startswith("tandem_")]
    assert len(ours) > 25
    for family in ours:
        names = {sample.name for sample in family.samples}
        assert names & on_it, f"{family.name} is on no panel"


async def test_every_label_of_the_dashboard_exists(expressions, shown):
    labels_of: dict[str, set[str]] = {}
    for sample in shown.samples:
        labels_of.setdefault(sample.name, SCRAPERS_LABELS.copy()).update(sample.labels)
    for expression in expressions:
        for name, selector in SELECTOR.findall(expression):
            assert set(LABEL.findall(selector)) <= labels_of[name], expression
        known = set().union(*(labels_of[name] for name in METRIC.findall(expression)))
        for grouping in GROUPING.findall(expression):
            assert set(re.findall(r"\w+", grouping)) <= known, expression


def test_brackets_are_balanced(expressions):
    for expression in expressions:
        for opening, closing in ("()", "{}", "[]"):
            assert expression.count(opening) == expression.count(closing), expression


def test_rows_and_panels(dashboard):
    panels = dashboard["panels"]
    assert [panel["title"] for panel in panels if panel["type"] == "row"] == ROWS
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(taken)) == len(taken), "panels overlap"
    assert all(x < 24 for x, _ in taken)


def test_variables_are_those_that_are_used(dashboard):
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(dashboard)))
    assert used == {variable["name"] for variable in dashboard["templating"]["list"]}
