"""Served logits are those of an eager forward that sees what the trace says was kept. The main test of this package."""

from __future__ import annotations

import pytest

from tests.engine import checks
from tests.engine.harness import PAGE_TOKENS as P
from tests.engine.harness import Run, random_prompt

POLICIES = {
    "streaming": {"policy": "streaming"},
    "h2o-exact": {"policy": "h2o", "score": "sum", "prefill_queries": "all", "score_every": 1},
    "h2o": {"policy": "h2o"},
    "keydiff": {"policy": "keydiff"},
    "h2o-keydiff": {"policy": "h2o-keydiff"},
}
WHOLE = 12 * P
CHUNKS = {"page": P, "two-pages": 2 * P, "whole": WHOLE}
PROMPTS = {"long": 9 * P + 17, "page": P, "one": 1, "middle": 4 * P + 3, "late": 6 * P}
MAX_TOKENS = {"long": 2 * P, "page": 4 * P + 2, "one": 4 * P + 7, "middle": 2 * P, "late": 2 * P}


@pytest.fixture(scope="module", params=[True, False], ids=["prefix-cache", "no-prefix-cache"])
def prefix_caching(request):
    return request.param


@pytest.fixture(scope="module", params=POLICIES)
def runs(request, engine, prefix_caching) -> dict[str, Run]:
    """Five requests at once, one of them late, per chunk size; a second round of `long` hits the prefix cache."""
    runs = {}
    eviction = POLICIES[request.param] | {"budget": 4 * P}
    with engine(eviction=eviction, chunk_tokens=WHOLE, prefix_caching=prefix_caching) as served:
        for chunk, chunk_tokens in CHUNKS.items():
            served.chunk_tokens = chunk_tokens
            prompts = {f"{name}-{chunk}": random_prompt(n, seed=n + chunk_tokens) for name, n in PROMPTS.items()}
            prompts[f"again-{chunk}"] = prompts[f"long-{chunk}"][: 7 * P] + random_prompt(P, seed=1)
            tokens = {f"{name}-{chunk}": n for name, n in MAX_TOKENS.items()} | {f"again-{chunk}": P}
            runs[chunk] = served.run(
                prompts, max_tokens=tokens, arrive_at={f"late-{chunk}": 7, f"again-{chunk}": 30}, num_logits=-1
            )
    return runs


@pytest.fixture(params=CHUNKS)
def run(request, runs) -> Run:
    return runs[request.param]


@pytest.mark.parametrize("check", checks.ALWAYS, ids=lambda check: check.__name__)
def test_run(run, check):
    check(run)


@pytest.mark.parametrize("runs", ["h2o-exact", "h2o", "h2o-keydiff"], indirect=True)
def test_masses(run):
    checks.masses(run)


@pytest.mark.parametrize("runs", ["keydiff", "h2o-keydiff"], indirect=True)
def test_key_differences(run):
    checks.key_differences(run)


def test_the_runs_contain_what_they_are_for(runs, prefix_caching):
    for chunk, run in runs.items():
        assert any(len(step.rows) >= 4 for step in run.steps)
        assert any(len({row.num_scheduled_tokens for row in step.rows.values()}) > 1 for step in run.steps)
        # Only pages computed before the first hole of `long` can be hit.
        first_hole_at = run.lines(f"long-{chunk}")[0].num_computed_tokens
        hit = min(7 * P, first_hole_at // P * P) if prefix_caching else 0
        assert run.rows(f"again-{chunk}")[0].num_cached_tokens == hit
        for name in run.answers:
            computed = len(run.answers[name].prompt) + len(run.answers[name].tokens) - 1
            evicted = sum(len(line.pages) for line in run.lines(name))
            # The last step opens one page at most, and nobody trims after it.
            assert evicted in (computed // P - 4, -(-computed // P) - 4, computed // P - 5), name
            assert evicted >= 1
