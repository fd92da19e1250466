"""One picture per question. Needs matplotlib (`pip install "vllm-evict[bench]"`)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes

from vllm_evict.bench.context import ContextResult
from vllm_evict.bench.load import POLICIES, ScenarioResult

matplotlib.use("Agg")

from matplotlib import pyplot

COLOURS = {"off": "#777777", "streaming": "#1f77b4", "h2o": "#d62728"}
TIMELINE_OF = "short_pool"


def plot_all(scenarios: Sequence[ScenarioResult], contexts: Sequence[ContextResult], folder: Path) -> list[Path]:
    """Whatever the results allow."""
    paths = []
    by_name = {result.scenario.name: result for result in scenarios}
    if TIMELINE_OF in by_name:
        first = by_name[TIMELINE_OF].scenario
        pools = [r for r in scenarios if (r.scenario.shape, r.scenario.concurrency) == (first.shape, first.concurrency)]
        paths.append(_tokens_against_pool(pools, folder / "tokens-per-second.png"))
        paths.append(_over_time(by_name[TIMELINE_OF], folder / "running-requests.png"))
    paths += [_time_against_context(result, folder / "time-per-token.png") for result in contexts]
    return paths


def _tokens_against_pool(results: Sequence[ScenarioResult], path: Path) -> Path:
    """Output tokens/s against pool size."""
    results = sorted(results, key=lambda result: result.scenario.pool_share)
    scenario = results[0].scenario
    figure, axes = pyplot.subplots(figsize=(6, 4))
    shares = [100 * result.scenario.pool_share for result in results]
    for policy in POLICIES:
        _with_spread(axes, shares, [r.values(policy, lambda m: m.output_tokens_per_second) for r in results], policy)
    axes.set(
        xlabel=f"pool, % of what {scenario.concurrency} requests need without eviction",
        ylabel="output tokens/s",
        title=f"{scenario.shape}, budget {scenario.budget_tokens}",
        ylim=(0, None),
    )
    return _save(figure, axes, path)


def _time_against_context(result: ContextResult, path: Path) -> Path:
    """Milliseconds per token against context length."""
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for policy in POLICIES:
        _with_spread(axes, result.contexts, result.ms_per_token[policy], policy)
    axes.axvline(result.budget_tokens, color="black", linestyle=":", linewidth=1, label="budget")
    axes.set(
        xlabel="tokens before",
        ylabel="ms per output token",
        title=f"{result.batch} requests decoding, budget {result.budget_tokens}",
        ylim=(0, None),
    )
    return _save(figure, axes, path)


def _over_time(result: ScenarioResult, path: Path) -> Path:
    """Running requests and preemptions in the last round."""
    scenario = result.scenario
    figure, (above, below) = pyplot.subplots(2, sharex=True, figsize=(6, 5))
    for policy in POLICIES:
        samples = result.runs(policy)[-1].samples
        seconds = [sample.seconds for sample in samples]
        above.step(seconds, [s.running for s in samples], where="post", label=policy, color=COLOURS[policy])
        below.step(seconds, [s.preemptions for s in samples], where="post", color=COLOURS[policy])
    above.set(
        ylabel="running requests",
        title=f"{scenario.requests} requests, {scenario.shape},\npool of {scenario.full_requests:g} of them in full",
        ylim=(0, None),
    )
    below.set(xlabel="seconds", ylabel="preemptions so far", ylim=(0, None))
    below.grid(alpha=0.3)
    return _save(figure, above, path)


def _with_spread(axes: Axes, x: Sequence[float], runs: Sequence[Sequence[float]], policy: str) -> None:
    """Medians, with bars from the least to the greatest."""
    middle = [statistics.median(run) for run in runs]
    down = [m - min(run) for m, run in zip(middle, runs, strict=True)]
    up = [max(run) - m for m, run in zip(middle, runs, strict=True)]
    axes.errorbar(x, middle, (down, up), label=policy, color=COLOURS[policy], marker="o", capsize=3)


def _save(figure: pyplot.Figure, axes: Axes, path: Path) -> Path:
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=90, bbox_inches="tight")
    pyplot.close(figure)
    return path
