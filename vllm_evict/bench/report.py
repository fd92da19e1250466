"""Results that can be read again: versions, machine, commit, tables, plots."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from vllm_evict.bench.context import ContextResult
from vllm_evict.bench.load import POLICIES, Measurement, Sample, Scenario, ScenarioResult, spread


def machine_facts(model: str) -> dict[str, str]:
    """Versions, machine, commit and model of a run."""
    commit = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return {
        "vllm_evict": importlib.metadata.version("vllm-evict"),
        "vllm": importlib.metadata.version("vllm"),
        "torch": importlib.metadata.version("torch"),
        "commit": commit or "unknown",
        "machine": f"{platform.machine()}, {_cpu_name()}, {len(os.sched_getaffinity(0))} cores",
        "model": Path(model).name,
    }


# ---- files ------------------------------------------------------------------------


def write_json(path: Path, result: ScenarioResult | ContextResult) -> None:
    path.write_text(json.dumps(asdict(result)) + "\n")


def read_json(path: Path) -> ScenarioResult | ContextResult:
    """What `write_json` wrote."""
    value = json.loads(path.read_text())
    if "scenario" not in value:
        return ContextResult(**value)
    measurements = [
        Measurement(**m | {"samples": tuple(Sample(**sample) for sample in m["samples"])})
        for m in value["measurements"]
    ]
    return ScenarioResult(
        value["facts"], Scenario(**value["scenario"]), tuple(measurements), value["different_victims"]
    )


def throughput_report(folder: Path) -> str:
    """Write `throughput.md`, and plots if matplotlib is there, from all results in `folder`; return the text."""
    results = [read_json(path) for path in sorted(folder.glob("*.json"))]
    scenarios = [result for result in results if isinstance(result, ScenarioResult)]
    contexts = [result for result in results if isinstance(result, ContextResult)]
    scenarios.sort(key=lambda r: (r.scenario.shape, r.scenario.concurrency, r.scenario.full_requests))
    tables = [scenario_table(scenarios)] if scenarios else []
    tables += [context_table(result) for result in contexts]
    text = "\n\n".join([*tables, *sorted({_facts_line(result.facts) for result in results})])
    (folder / "throughput.md").write_text(text + "\n")
    lines = [text, "", _plot(scenarios, contexts, folder)]
    by_name = {result.scenario.name: result for result in scenarios}
    if "choosing" in by_name:
        lines.append(choosing_line(by_name["choosing"]))
    if {"short_pool", "roomy"} <= set(by_name):
        lines.append(ratios_line(by_name["short_pool"], by_name["roomy"]))
    return "\n".join(lines)


def _plot(scenarios: list[ScenarioResult], contexts: list[ContextResult], folder: Path) -> str:
    if importlib.util.find_spec("matplotlib") is None:
        return 'no plots: matplotlib is missing (pip install "vllm-evict[bench]")'
    from vllm_evict.bench.plots import plot_all

    return "plots: " + " ".join(map(str, plot_all(scenarios, contexts, folder)))


# ---- lines and tables ---------------------------------------------------------------


def ratios_line(short_pool: ScenarioResult, roomy: ScenarioResult) -> str:
    """The line that the project's targets are held against."""
    parts = [
        f"{name} streaming/off={result.ratio('streaming'):.3f} h2o/off={result.ratio('h2o'):.3f}"
        for name, result in (("short_pool", short_pool), ("roomy", roomy))
    ]
    return "ratios: " + " ".join(parts)


def choosing_line(result: ScenarioResult) -> str:
    """Whether h2o is more than streaming in disguise."""
    share = "none" if result.different_victims is None else f"{result.different_victims:.1%}"
    return (
        f"choosing ({result.scenario.shape}, budget {result.scenario.budget_tokens}): h2o evicted other pages than "
        f"streaming would have in {share} of its decisions; streaming/off={result.ratio('streaming'):.3f} "
        f"h2o/off={result.ratio('h2o'):.3f}"
    )


def scenario_table(results: Sequence[ScenarioResult]) -> str:
    rows = []
    for result in results:
        scenario = result.scenario
        for policy in POLICIES:
            preemptions = result.values(policy, lambda m: m.preemptions)
            rows.append(
                [
                    scenario.name,
                    f"{scenario.shape}, budget {scenario.budget_tokens}",
                    f"{scenario.usable_pages} ({scenario.pool_share:.0%})",
                    str(scenario.concurrency),
                    policy,
                    spread(result.values(policy, lambda m: m.output_tokens_per_second)),
                    f"{result.ratio(policy):.2f}",
                    spread(result.values(policy, lambda m: m.ms_per_output_token)),
                    spread(result.values(policy, lambda m: m.ms_to_first_token / 1000), 1),
                    f"{min(preemptions)}-{max(preemptions)}",
                ]
            )
    header = ["load", "tokens", "pool pages (of need)", "open", "policy", "output tokens/s", "x off"]
    return markdown_table([*header, "ms/token", "s to first token", "preemptions"], rows)


def context_table(result: ContextResult) -> str:
    rows = [
        [str(context)] + [spread(result.ms_per_token[policy][i], 1) for policy in POLICIES]
        for i, context in enumerate(result.contexts)
    ]
    return markdown_table(["tokens before", *(f"{policy}, ms/token" for policy in POLICIES)], rows)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns line up in plain text, too."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(header), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(line, rows)])


def _facts_line(facts: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown CPU"
