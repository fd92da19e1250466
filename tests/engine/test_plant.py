"""The planted heavy hitter: one token draws most of the attention, so h2o must keep its page and streaming must not."""

from __future__ import annotations

import pytest
import torch

from tests.engine import checks
from tests.engine.harness import PAGE_TOKENS as P
from tests.engine.harness import Run, random_prompt
from tests.models.plant import HEAVY, NUM_NEUTRAL_TOKENS

DISTANT = {"policy": "h2o", "budget": 4 * P}
PAPER = {"policy": "h2o", "budget": 4 * P, "score": "sum", "prefill_queries": "all", "score_every": 1}
VARIANTS = {
    "all heads": {},
    "query head 3": {"heads": (3,)},
    "query head 0": {"heads": (0,)},
    "layer 1 of 2": {"layers": (1,)},
    "layer 0 of 3": {"layers": (0,), "num_layers": 3},
    "KV head 1": {"kv_heads": (1,)},
    "MHA head 2": {"heads": (2,), "num_kv_heads": 4},
    "MQA head 2": {"heads": (2,), "num_kv_heads": 1},
}


HEAVY_PAGES = (1, 2, 4, 6)


def heavy_prompt(num_tokens: int, heavy_page: int, seed: int) -> list[int]:
    """Neutral tokens, and HEAVY in the middle of one page."""
    prompt = random_prompt(num_tokens, seed=seed, below=NUM_NEUTRAL_TOKENS)
    prompt[heavy_page * P + 11] = HEAVY
    return prompt


def kept_pages(run: Run, name: str) -> set[int]:
    """Logical pages held in the request's last step."""
    return {page for page, block in enumerate(run.rows(name)[-1].table) if block is not None}


@pytest.mark.parametrize("variant", VARIANTS)
def test_h2o_keeps_the_page_with_heavy(engine, models, variant):
    """C14: whoever attends to it, a head, a layer, a group; each of four requests keeps its own page."""
    prompts = {f"page-{page}": heavy_prompt(9 * P + page, page, seed=page) for page in HEAVY_PAGES}
    with engine(models("plant", **VARIANTS[variant]), eviction=DISTANT) as served:
        run = served.run(prompts, max_tokens=P + 9)
    its_page_is_kept(run)


@pytest.mark.parametrize("variant", ["all heads", "MHA head 2", "MQA head 2"])
def test_the_papers_score(engine, models, variant):
    """The running sum favours old pages, so that one head of four may lose to them; all heads do not."""
    prompts = {f"page-{page}": heavy_prompt(9 * P + page, page, seed=page) for page in HEAVY_PAGES}
    with engine(models("plant", **VARIANTS[variant]), eviction=PAPER) as served:
        run = served.run(prompts, max_tokens=P + 9)
    checks.choices(run)
    checks.masses(run)
    if variant == "all heads":
        its_page_is_kept(run)


def its_page_is_kept(run: Run) -> None:
    for page in HEAVY_PAGES:
        rows = [row for row in run.rows(f"page-{page}") if row.num_computed_tokens > (page + 1) * P]
        assert all(row.table[page] is not None for row in rows)
        newest = len(rows[-1].table) - 1
        assert kept_pages(run, f"page-{page}") >= {0, page, newest}
    for check in (checks.logits, checks.greedy_tokens, checks.choices, checks.masses):
        check(run)


def test_streaming_loses_it(engine, models):
    """The contrast: recency alone forgets the heavy hitter."""
    with engine(models("plant"), eviction={"policy": "streaming", "budget": 4 * P}) as served:
        run = served.run({"a": heavy_prompt(9 * P, 2, seed=1)}, max_tokens=3 * P)
    assert 2 not in kept_pages(run, "a")
    for check in checks.ALWAYS:
        check(run)


def test_order_of_heads_does_not_matter(engine, models):
    """C14: the groups of heads change places; evicted pages, tokens and scores stay."""
    prompts = {"a": heavy_prompt(9 * P, 2, seed=1), "b": random_prompt(7 * P, seed=2, below=NUM_NEUTRAL_TOKENS)}
    runs = []
    for order in (None, (1, 0)):
        model = models("plant", kv_heads=(1,), **({} if order is None else {"head_order": order}))
        with engine(model, eviction=DISTANT) as served:
            runs.append(served.run(prompts, max_tokens=3 * P))
    straight, swapped = runs
    for name in prompts:
        assert straight.answers[name].tokens == swapped.answers[name].tokens
        assert [(line.num_computed_tokens, line.pages) for line in straight.lines(name)] == [
            (line.num_computed_tokens, line.pages) for line in swapped.lines(name)
        ]
        for mine, other in zip(straight.lines(name), swapped.lines(name), strict=True):
            torch.testing.assert_close(
                torch.tensor(mine.scores["attention"]),
                torch.tensor(other.scores["attention"]),
                atol=1e-5,
                rtol=1e-4,
                equal_nan=True,
            )
    checks.masses(straight)
    checks.masses(swapped)


@pytest.mark.parametrize("eviction", [DISTANT, PAPER], ids=["distant-mean", "sum"])
def test_heavy_is_kept_across_a_prefix_hit(engine, models, eviction):
    """C16: pages that came from the cache are on trial like new ones; the question finds the heavy one among them."""
    first = heavy_prompt(6 * P, 2, seed=1)
    question = first + random_prompt(6 * P, seed=2, below=NUM_NEUTRAL_TOKENS)
    settings = eviction | {"budget": 6 * P}
    runs = {}
    for warm in (True, False):
        with engine(models("plant"), eviction=settings) as served:
            if warm:
                served.run({"first": first}, max_tokens=2)
            runs[warm] = served.run({"question": question}, max_tokens=3 * P)
    assert runs[True].rows("question")[0].num_cached_tokens == 6 * P
    for run in runs.values():
        assert 2 in kept_pages(run, "question")
        for check in checks.ALWAYS:
            check(run)
        checks.masses(run)
    assert runs[True].answers["question"].tokens[0] == runs[False].answers["question"].tokens[0]


def test_a_heavier_page_replaces_the_kept_one(engine, models):
    """Invariant 11: one place is open beside sink and recent pages; it goes to whom later queries attend to."""
    prompt = random_prompt(30 * P, seed=1, below=NUM_NEUTRAL_TOKENS)
    heavy_pages = {2: 1, 8: 12}  # tokens of HEAVY per page: the second outshines the first by far
    for page, count in heavy_pages.items():
        prompt[page * P : page * P + count] = [HEAVY] * count
    with engine(models("plant"), eviction=DISTANT | {"recent": 2 * P}) as served:
        run = served.run({"a": prompt}, max_tokens=P)
    for check in checks.ALWAYS:
        check(run)
    checks.masses(run)
    held = [{page for page, block in enumerate(row.table) if block is not None} for row in run.rows("a")]
    middle = [next((page for page in sorted(pages) if page in heavy_pages), None) for pages in held]
    changes = [page for before, page in zip([None, *middle], middle, strict=False) if page != before]
    assert changes == [2, 8]
    assert 2 not in held[-1] and 8 in held[-1]


def test_a_hit_longer_than_the_budget_is_judged_as_its_owner_judged(engine, models):
    """C16: the 10 pages on offer come with the scores that their last owner reported, so the heavy one is taken."""
    first = heavy_prompt(10 * P, 2, seed=1)
    question = first + random_prompt(P, seed=2, below=NUM_NEUTRAL_TOKENS)
    kept = {}
    for warm in (False, True):
        with engine(models("plant"), eviction=DISTANT, chunk_tokens=11 * P) as served:
            if warm:
                served.run({"first": [*first, 7]}, max_tokens=1)
            run = served.run({"question": question}, max_tokens=P)
        for check in checks.ALWAYS:
            check(run)
        kept[warm] = kept_pages(run, "question")
    assert run.lines("question")[0].pages == (1, 3, 4, 5, 6, 7)
    assert 2 in kept[False] and 2 in kept[True]
