"""Half precision: with holes the engine is no farther from the fp32 oracle than plain vLLM is without."""

from __future__ import annotations

import pytest
import torch

from tests.engine import checks
from tests.engine.harness import PAGE_TOKENS as P
from tests.engine.harness import Run, random_prompt


def rms_error(run: Run) -> float:
    """Of all returned logits, against the fp32 oracle fed with the very tokens that the engine chose."""
    errors = []
    for name, answer in run.answers.items():
        expected = run.reference(name, 0).logits[len(answer.prompt) - 1 : -1]
        errors.append((answer.logits - expected.gather(1, answer.logit_tokens)).flatten())
    return torch.cat(errors).square().mean().sqrt().item()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_error_is_that_of_the_number_format(engine, dtype):
    prompts = {"a": random_prompt(7 * P + 3, seed=1), "b": random_prompt(P, seed=2), "c": random_prompt(4 * P, seed=3)}
    errors = {}
    for policy in (None, "streaming", "h2o"):
        eviction = None if policy is None else {"policy": policy, "budget": 4 * P}
        with engine(eviction=eviction, dtype=dtype) as served:
            run = served.run(prompts, max_tokens=4 * P, num_logits=-1)
        errors[policy] = rms_error(run)
        if policy is not None:
            for check in (checks.positions, checks.held_pages, checks.pool, checks.slots, checks.attended):
                check(run)
            assert all(run.lines(name) for name in prompts)
    checks.masses(run, tolerance=0.02)  # a probability of a few tenths, in 8 bits
    assert errors[None] > 10 * checks.LOGIT_TOLERANCE  # it is half precision
    assert max(errors["streaming"], errors["h2o"]) <= 2 * errors[None], errors
