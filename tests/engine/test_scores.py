"""Every kind of score, exact and sampled: the numbers in the trace are those of eager attention weights."""

from __future__ import annotations

import pytest

from tests.engine import checks
from tests.engine.harness import PAGE_TOKENS as P
from tests.engine.harness import random_prompt

KINDS = ["distant-mean", "sum", "mean", "ema"]
OBSERVED = {
    "all": {"prefill_queries": "all", "score_every": 1},
    "default": {},
    "few": {"prefill_queries": 5, "score_every": 7},
    "decode only": {"prefill_queries": 0, "score_every": 2},
}


@pytest.mark.parametrize("model", ["tiny-mha", "tiny", "tiny-mqa"])
def test_heads(engine, model):
    """The mean over query heads and layers, whatever the number of KV heads."""
    served_and_checked(engine, model, {"score": "mean"})


@pytest.mark.parametrize("observed", OBSERVED)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(engine, kind, observed):
    served_and_checked(engine, "tiny", {"score": kind} | OBSERVED[observed])


def served_and_checked(engine, model, settings):
    eviction = {"policy": "h2o", "budget": 5 * P} | settings
    prompts = {"a": random_prompt(9 * P + 7, seed=1), "b": random_prompt(3 * P, seed=2), "c": random_prompt(P, seed=3)}
    with engine(model, eviction=eviction, chunk_tokens=3 * P) as served:
        run = served.run(prompts, max_tokens={"a": 20, "b": 3 * P, "c": 5})
    checks.masses(run)
    checks.choices(run)
    checks.logits(run)


def test_default_settings_are_the_documented_ones(engine):
    """`checks` counts with these; here they are read off the running engine."""
    with engine(eviction={"policy": "h2o", "budget": 8 * P}) as served:
        config = served.worker.eviction._config
        assert (config.score, config.prefill_queries, config.score_every) == ("distant-mean", 64, 8)
        assert (config.recent_tokens, config.distant_tokens) == (4 * P, 2 * P)
        assert config.sink == 4
