"""Metrics, their page, the alerts and the dashboard say the same: every name that one uses, the others know."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.core import Metric

from keepstep.agent.metrics import NodeMetrics
from keepstep.controller.ledger import Ledger
from keepstep.controller.metrics import JobMetrics, Meter
from keepstep.core.actions import Announce
from keepstep.core.events import AgentJoined, NodeProgressed, Ticked
from keepstep.core.job import JobConfig, JobMachine
from keepstep.core.types import Generation

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "keepstep.rules.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "keepstep.json"
MOST_SERIES = 250
SUFFIXES = {
    "counter": ["_total"],
    "gauge": [""],
    "summary": ["_sum", "_count"],
    "histogram": ["_sum", "_count", "_bucket"],
}
NAME = re.compile(r"\bkeepstep_[a-z_]+")


def job_families(tmp_path: Path, world_size: int = 2) -> list[Metric]:
    """Of a job whose workers have just been ordered."""
    machine = JobMachine(JobConfig(world_size=world_size, spares=1, job="j"))
    machine.step(AgentJoined(node="here", slots=world_size + 1), 0.0)
    machine.step(Ticked(), 0.1)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        metrics = JobMetrics(
            job="j",
            mode="run",
            meter=Meter(),
            ledger=ledger,
            picture=machine.snapshot,
            incidents=list,
            agents=lambda: (1, 0),
        )
        assert metrics.text().startswith(b"# HELP keepstep_")
        return list(metrics.families())


def node_families() -> list[Metric]:
    workers = SimpleNamespace(living=list)
    metrics = NodeMetrics("n", 2, workers, SimpleNamespace(), SimpleNamespace(lost_since_s=None))  # type: ignore[arg-type]
    return list(metrics.families())


def rows(families: Iterable[Metric], place: str) -> Iterator[tuple[str, str, str, str, str]]:
    for family in families:
        labels = ", ".join(f"`{name}`" for name in getattr(family, "_labelnames", ()) if name != "le")
        name = family.name + ("_total" if family.type == "counter" else "")
        yield f"`{name}`", family.type, labels, place, family.documentation


def documented() -> dict[str, str]:
    """Metric -> type, from the table of docs/metrics.md."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| `(keepstep_\w+)` \| (\w+) \|", text, re.M))


def series_names() -> set[str]:
    """What a query may name."""
    found = set()
    for name, kind in documented().items():
        found |= {name.removesuffix("_total") + suffix for suffix in SUFFIXES[kind]}
    return found


def test_the_page_has_exactly_the_metrics_that_the_code_exports(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    exported = [*rows(job_families(tmp_path), "controller"), *rows(node_families(), "agent")]
    missing = [line for row in exported if (line := f"| {' | '.join(row)} |") not in text]
    assert not missing, "docs/metrics.md lacks:\n" + "\n".join(missing)
    assert set(documented()) == {row[0].strip("`") for row in exported}, "and it names nothing else"


def test_a_job_of_2000_ranks_has_as_many_series_as_a_small_one(tmp_path: Path) -> None:
    counts = []
    for size in (2, 2000):
        folder = tmp_path / str(size)
        folder.mkdir()
        counts.append(sum(len(family.samples) for family in job_families(folder, size)))
    assert counts[0] == counts[1] < MOST_SERIES


def test_steps_are_counted_once_whoever_tells_of_them_and_across_a_new_world() -> None:
    meter = Meter()

    def progress(published: int, now_s: float) -> None:
        event = NodeProgressed(node="n", generation=0, published=published, steps={})
        meter.saw(event, [], now_s)

    for published, now_s in ((0, 0.0), (10, 1.0), (10, 1.1), (8, 1.2), (30, 3.0)):
        progress(published, now_s)
    assert meter.steps_committed == 30 and meter.step_seconds == pytest.approx(2.0)
    assert sum(meter.step_counts) == 20, "a span whose start was not seen has no step time"
    fresh = Generation(number=1, ranks=(4, 5), fresh=True, store="n")
    meter.saw(Ticked(), [Announce(generation=fresh, reason="again")], 4.0)
    progress(5, 60.0)
    assert meter.steps_committed == 35 and sum(meter.step_counts) == 20


# ---- alerts -------------------------------------------------------------------------------------


def rule_blocks() -> list[str]:
    return RULES.read_text(encoding="utf-8").split("- alert: ")[1:]


def test_each_alert_has_all_that_a_pager_shows_and_a_place_in_the_runbook() -> None:
    runbook = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    anchors = {
        re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.+)$", runbook, re.M)
    }
    for block in rule_blocks():
        name = block.split("\n", 1)[0]
        assert re.search(r"severity: (critical|warning)\n", block), name
        assert "summary: " in block and "description: " in block, name
        [anchor] = re.findall(r"runbook_url: docs/operations\.md#([a-z-]+)", block)
        assert anchor in anchors, f"{name}: docs/operations.md has no section {anchor}"
        expression = re.search(r"expr: (.+)", block)
        assert expression is not None
        assert set(NAME.findall(expression.group(1))) <= series_names(), name
    assert len(rule_blocks()) >= 10


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs Prometheus (as root: apt-get install prometheus)"
)
def test_promtool_accepts_the_rules_and_their_own_tests() -> None:
    for what in (
        ["check", "rules", str(RULES)],
        ["test", "rules", str(RULES.with_name("keepstep.rules.test.yml"))],
    ):
        done = subprocess.run(["promtool", *what], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    tested = RULES.with_name("keepstep.rules.test.yml").read_text(encoding="utf-8")
    untested = [name for block in rule_blocks() if (name := block.split("\n", 1)[0]) not in tested]
    assert not untested, f"alerts without a test: {untested}"


# ---- the dashboard ------------------------------------------------------------------------------


def test_the_dashboard_asks_for_metrics_that_exist_and_each_panel_says_what_it_shows() -> None:
    board: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    variables = {one["name"]: one for one in board["templating"]["list"]}
    assert (
        variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    )
    panels = board["panels"]
    numbers = [panel["id"] for panel in panels]
    assert len(numbers) == len(set(numbers)), "ids are unique"
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        title, place = panel["title"], panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert title and not cells & taken and place["x"] + place["w"] <= 24, title
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["description"] and panel["fieldConfig"]["defaults"]["unit"], title
        assert panel["datasource"]["uid"] == "${datasource}", title
        letters = [target["refId"] for target in panel["targets"]]
        assert letters and len(letters) == len(set(letters)), title
        for target in panel["targets"]:
            names = NAME.findall(target["expr"])
            assert names and set(names) <= series_names(), f"{title}: {target['expr']}"
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= {*variables, "__rate_interval"}, title
            assert target["legendFormat"] and target["datasource"]["uid"] == "${datasource}", title
    for variable in variables.values():
        assert set(NAME.findall(str(variable.get("definition", "")))) <= series_names()
