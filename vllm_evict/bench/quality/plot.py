"""The picture: what a method costs on plain text against what it forgets. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

import matplotlib

from vllm_evict.bench.quality.results import Results
from vllm_evict.bench.quality.statistics import Interval, interval

matplotlib.use("Agg")

from matplotlib import pyplot


def plot(results: Results, context_tokens: int, path: Path) -> Path:
    """One panel per budget and page size; lower and further left is better. The plain window is off the scale."""
    settings = results.settings
    columns = min(len(settings), 2)
    rows = -(-len(settings) // columns)
    names = sorted({name for budget, page in settings for p in (page, 0) for name in results.methods(budget, p)})
    names.remove("plain window")
    colours = {name: pyplot.get_cmap("tab20")(i) for i, name in enumerate(names)}
    figure, panels = pyplot.subplots(rows, columns, figsize=(5 * columns, 4 * rows), squeeze=False)
    for axes, (budget, page) in zip(panels.flat, settings, strict=False):
        for name in names:
            page_tokens = 0 if name.startswith("tokens:") else page
            plain = interval(results.plain(name, budget, page_tokens))
            recall = interval(results.recall(name, budget, page_tokens, window_has=False))
            axes.errorbar(
                plain.mean,
                recall.mean,
                xerr=_bars(plain),
                yerr=_bars(recall),
                marker="o" if page_tokens else "^",
                color=colours[name],
                label=name,
                markersize=7,
                elinewidth=0.4,
            )
        axes.set(xlabel="plain text: KL to the full cache", ylabel="passages that left the window: KL")
        axes.set_title(f"{budget / context_tokens:.0%} kept, pages of {page} tokens", fontsize=10)
        axes.grid(alpha=0.3)
    for axes in list(panels.flat)[len(settings) :]:
        axes.set_visible(False)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=4, loc="lower center", fontsize=9)
    figure.tight_layout(rect=(0, 0.25 / rows, 1, 1))
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
    return path


def _bars(of: Interval) -> list[list[float]]:
    return [[of.mean - of.low], [of.high - of.mean]]
