"""One picture per question. Needs matplotlib (`pip install "vllm-evict[bench]"`)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_evict.bench.throughput import Measurement, Scenario

COLOURS = {"off": "#777777", "streaming": "#1f77b4", "h2o": "#d62728"}


def plot_throughput(scenarios: Sequence[Scenario], measurements: Sequence[Measurement], folder: Path) -> list[Path]:
    """Tokens/s and preemptions against pool size, at the scenarios that share the quick one's shape."""
    shape = scenarios[0]
    same = [s for s in scenarios if (s.input_tokens, s.output_tokens) == (shape.input_tokens, shape.output_tokens)]
    same.sort(key=lambda scenario: scenario.pool_pages)
    title = f"{shape.input_tokens} in / {shape.output_tokens} out, budget {shape.budget_tokens}"
    return [
        _against_pool(
            same, measurements, lambda m: m.output_tokens_per_second, "output tokens/s", title, folder / "tokens.png"
        ),
        _against_pool(
            same,
            measurements,
            lambda m: m.mean_ms_per_output_token,
            "ms per output token",
            title,
            folder / "latency.png",
        ),
        _against_pool(same, measurements, lambda m: m.preemptions, "preemptions", title, folder / "preemptions.png"),
    ]


def _against_pool(
    scenarios: Sequence[Scenario],
    measurements: Sequence[Measurement],
    value: Callable[[Measurement], float],
    label: str,
    title: str,
    path: Path,
) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for policy, colour in COLOURS.items():
        runs = [[value(m) for m in measurements if (m.scenario, m.policy) == (s.name, policy)] for s in scenarios]
        middle = [statistics.median(run) for run in runs]
        spread = [
            [m - min(r) for m, r in zip(middle, runs, strict=True)],
            [max(r) - m for m, r in zip(middle, runs, strict=True)],
        ]
        axes.errorbar(
            [s.full_requests for s in scenarios], middle, spread, label=policy, color=colour, marker="o", capsize=3
        )
    axes.set(xlabel="pool size, in requests without eviction", ylabel=label, title=title, ylim=(0, None))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    return path
