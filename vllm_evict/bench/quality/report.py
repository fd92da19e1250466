"""Tables, the plot and the line of ratios, from what was measured."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

from vllm_evict.bench.quality.results import Results, mean
from vllm_evict.bench.quality.statistics import Interval, interval, paired
from vllm_evict.bench.report import markdown_table

CONTROLS = ("plain window", "random", "streaming")
"""Not to be recommended for recall: what others are compared with."""
MOST_PLAIN_LOSS = 1.05
"""A policy that costs more than this times the KL of streaming or of random on plain text is no recommendation."""

# ---- tables -------------------------------------------------------------------------


def table(results: Results, budget_tokens: int, page_tokens: int) -> str:
    """One line per method; with it the token-level reference at the same budget (page size 0)."""
    left = {"window_has": False}
    streaming = results.recall("streaming", budget_tokens, page_tokens, **left)
    random = results.recall("random", budget_tokens, page_tokens, **left)
    plain_streaming = mean(results.plain("streaming", budget_tokens, page_tokens))
    rows = []
    for page in (page_tokens, 0):
        for method in results.methods(budget_tokens, page):
            setting = (method, budget_tokens, page)
            gone = results.recall(*setting, **left)
            rows.append(
                [
                    method,
                    str(interval(results.plain(*setting))),
                    f"{mean(results.plain(*setting)) / plain_streaming:.2f}",
                    f"{mean(results.plain(*setting, 'agreement')):.1%}",
                    f"{math.exp(mean(results.plain(*setting, 'loss'))):.2f}",
                    str(interval(gone)),
                    f"{mean(results.recall(*setting, **left, field='accuracy')):.0%}",
                    str(paired(gone, streaming)),
                    str(paired(gone, random)),
                    f"{mean(results.recall(*setting, window_has=True)):.2f}",
                    f"{mean(results.recall(*setting)):.2f}",
                ]
            )
    header = [
        "method",
        "plain KL",
        "x streaming",
        "same first choice",
        "perplexity",
        "recall KL, left the window",
        "next token right",
    ]
    return markdown_table([*header, "less streaming", "less random", "in the window", "all passages"], rows)


def counts(results: Results, budget_tokens: int, page_tokens: int) -> str:
    left = len(results.recall("streaming", budget_tokens, page_tokens, window_has=False))
    still = len(results.recall("streaming", budget_tokens, page_tokens, window_has=True))
    return f"{left} passages have left a window of {budget_tokens} tokens, {still} are still in it."


# ---- the recommendation ---------------------------------------------------------------


def plain_ratio(results: Results, method: str, other: str, budget_tokens: int, page_tokens: int) -> float:
    """KL on plain text, as a multiple of the other method's."""
    mine, theirs = (mean(results.plain(name, budget_tokens, page_tokens)) for name in (method, other))
    return mine / theirs


def recommended(results: Results, budget_tokens: int, page_tokens: int) -> str | None:
    """The policy that recalls best of those that beat both controls there and lose to neither on plain text.

    Both outside the 95 % interval: a good mean of a few stretches is no reason to recommend.
    """
    good = []
    for method in results.methods(budget_tokens, page_tokens):
        if method in CONTROLS:
            continue
        gone = results.recall(method, budget_tokens, page_tokens, window_has=False)
        beats = all(_against(results, method, other, budget_tokens, page_tokens).below_zero for other in CONTROLS[1:])
        keeps_up = all(_keeps_up(results, method, other, budget_tokens, page_tokens) for other in CONTROLS[1:])
        if beats and keeps_up:
            good.append((mean(gone), method))
    return min(good)[1] if good else None


def _against(results: Results, method: str, other: str, budget_tokens: int, page_tokens: int) -> Interval:
    gone, theirs = (results.recall(name, budget_tokens, page_tokens, window_has=False) for name in (method, other))
    return paired(gone, theirs)


def _keeps_up(results: Results, method: str, other: str, budget_tokens: int, page_tokens: int) -> bool:
    mine, theirs = (results.plain(name, budget_tokens, page_tokens) for name in (method, other))
    return paired(mine, {case: MOST_PLAIN_LOSS * kl for case, kl in theirs.items()}).below_zero


def ratios_line(results: Results, budget_tokens: int, page_tokens: int) -> str:
    """The line that the project's target is held against: recall differences in nats, plain text as a multiple."""
    best = recommended(results, budget_tokens, page_tokens)
    shown = best or "h2o-keydiff"
    parts = [f"recommended={best or 'none'} budget={budget_tokens} page={page_tokens}"]
    for other in CONTROLS[1:]:
        parts.append(f"recall {shown} less {other}={_against(results, shown, other, budget_tokens, page_tokens)}")
    for other in CONTROLS[1:]:
        parts.append(f"plain {shown}/{other}={plain_ratio(results, shown, other, budget_tokens, page_tokens):.3f}")
    return "ratios: " + " ".join(parts)


# ---- everything -----------------------------------------------------------------------


def write_report(results: Results, settings: dict, facts: dict, folder: Path) -> str:
    """`quality.md`, and `quality.png` if matplotlib is there; returns what to print."""
    plain, again = results.full_loss()
    parts = [
        f"{settings['stretches']} stretches of {settings['context_tokens']} tokens of {settings['text']}; in each, "
        f"{settings['passages']} passages of {settings['passage_tokens']} tokens are read again after the stretch. "
        f"KL in nats to the full cache, with 95 % bootstrap intervals over stretches; differences are paired. "
        f"The full cache's own perplexity: {math.exp(plain):.2f} on plain text, {math.exp(again):.2f} on passages "
        "read again."
    ]
    for budget_tokens, page_tokens in results.settings:
        share = budget_tokens / settings["context_tokens"]
        parts += [
            f"### {share:.0%} kept ({budget_tokens} tokens), pages of {page_tokens}",
            counts(results, budget_tokens, page_tokens),
            table(results, budget_tokens, page_tokens),
        ]
    parts.append(", ".join(f"{name} {value}" for name, value in facts.items()))
    text = "\n\n".join(parts)
    (folder / "quality.md").write_text(text + "\n")
    lines = [text, ""]
    if importlib.util.find_spec("matplotlib") is None:
        lines.append('no plot: matplotlib is missing (pip install "vllm-evict[bench]")')
    else:
        from vllm_evict.bench.quality.plot import plot

        lines.append(f"plot: {plot(results, settings['context_tokens'], folder / 'quality.png')}")
    return "\n".join([*lines, ratios_line(results, *results.settings[0])])  # the largest budget, the smallest page
