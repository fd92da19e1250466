"""Positions that are rebased: the oracle with the same rebases gives the same logits."""

from __future__ import annotations

import pytest

from tests.engine import checks
from tests.engine.harness import PAGE_TOKENS as P
from tests.engine.harness import Run, random_prompt

LIMIT = 8 * P
POLICIES = {
    "streaming": {"policy": "streaming"},
    "h2o": {"policy": "h2o", "score": "sum", "prefill_queries": "all", "score_every": 1},
}
CHUNKS = {"page": P, "odd": P + 5, "two-pages": 2 * P}
PROMPTS = {"long": 19 * P + 17, "page": P, "middle": 7 * P + 3, "late": 11 * P}
MAX_TOKENS = {"long": 9 * P, "page": 12 * P + 2, "middle": 6 * P, "late": 2 * P}


@pytest.fixture(scope="module")
def short(models):
    """A model of 256 positions."""
    return models("tiny", max_positions=LIMIT)


@pytest.fixture(scope="module", params=POLICIES)
def runs(request, engine, short) -> dict[str, Run]:
    """Four requests at once, one of them late, per chunk size; all but the last pass the limit several times."""
    runs = {}
    eviction = POLICIES[request.param] | {"budget": 4 * P, "positions": "rebase"}
    with engine(short, eviction=eviction, chunk_tokens=2 * P, max_model_len=64 * P) as served:
        for chunk, chunk_tokens in CHUNKS.items():
            served.chunk_tokens = chunk_tokens
            prompts = {f"{name}-{chunk}": random_prompt(n, seed=n + chunk_tokens) for name, n in PROMPTS.items()}
            tokens = {f"{name}-{chunk}": n for name, n in MAX_TOKENS.items()}
            runs[chunk] = served.run(prompts, max_tokens=tokens, arrive_at={f"late-{chunk}": 7})
    return runs


@pytest.fixture(params=CHUNKS)
def run(request, runs) -> Run:
    return runs[request.param]


@pytest.mark.parametrize("check", checks.ALWAYS, ids=lambda check: check.__name__)
def test_run(run, check):
    check(run)


def test_positions_stay_below_the_limit(run):
    assert checks.rotary_positions(run, LIMIT) >= 8
    checks.hashed_pages_stand_where_they_were(run)


@pytest.mark.parametrize("runs", ["h2o"], indirect=True)
def test_masses(run):
    checks.masses(run)
