"""The picture: what a method costs on plain text against what it forgets. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

import matplotlib

from vllm_evict.bench.quality.report import Results
from vllm_evict.bench.quality.statistics import interval

matplotlib.use("Agg")

from matplotlib import pyplot


def plot(results: Results, context_tokens: int, path: Path) -> Path:
    """One panel per budget and page size; lower and further left is better. The plain window is off the scale."""
    settings = results.settings
    columns = min(len(settings), 2)
    rows = -(-len(settings) // columns)
    figure, panels = pyplot.subplots(rows, columns, figsize=(5.5 * columns, 4.2 * rows), squeeze=False)
    for axes, (budget, page) in zip(panels.flat, settings, strict=False):
        for page_tokens in (page, 0):
            for method in results.methods(budget, page_tokens):
                if method == "plain window":
                    continue
                plain = interval(results.plain(method, budget, page_tokens))
                recall = interval(results.recall(method, budget, page_tokens, window_has=False))
                axes.errorbar(
                    plain.mean,
                    recall.mean,
                    xerr=[[plain.mean - plain.low], [plain.high - plain.mean]],
                    yerr=[[recall.mean - recall.low], [recall.high - recall.mean]],
                    marker="o" if page_tokens else "^",
                    capsize=2,
                    alpha=0.8,
                    elinewidth=0.6,
                )
                axes.annotate(method, (plain.mean, recall.mean), xytext=(4, 4), textcoords="offset points", fontsize=7)
        axes.set(
            title=f"{budget / context_tokens:.0%} kept, pages of {page} tokens (triangles: token by token)",
            xlabel="plain text: KL to the full cache",
            ylabel="passages that left the window: KL",
        )
        axes.title.set_fontsize(9)
        axes.grid(alpha=0.3)
    for axes in list(panels.flat)[len(settings) :]:
        axes.set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
    return path
