"""C41: the logits of every prompt token too, so the whole visibility mask is compared and not its last rows only."""

from __future__ import annotations

import pytest
import torch

from tests.engine import checks
from tests.engine.harness import PAGE_TOKENS as P
from tests.engine.harness import random_prompt


@pytest.mark.parametrize("chunk_tokens", [P, 2 * P + 7])
@pytest.mark.parametrize("policy", ["streaming", "h2o"])
def test_every_prompt_token(engine, policy, chunk_tokens):
    """Twice the same prompt: the second time the API asks for logits, so vLLM must not skip cached pages."""
    prompt = random_prompt(8 * P + 5, seed=1)
    with engine(eviction={"policy": policy, "budget": 3 * P}, chunk_tokens=chunk_tokens) as served:
        runs = [served.run({name: prompt}, max_tokens=3, prompt_logits=True) for name in ("first", "second")]
    for run, name in zip(runs, ("first", "second"), strict=True):
        for check in checks.ALWAYS:
            check(run)
        answer = run.answers[name]
        expected = run.reference(name, 0).logits[: len(prompt) - 1]
        assert answer.prompt_logits.shape == expected.shape
        error = (answer.prompt_logits - expected).abs().max(dim=1).values
        assert error.max() <= checks.LOGIT_TOLERANCE, f"prompt token {int(error.argmax()) + 1}: {error.max():.2e}"
    torch.testing.assert_close(runs[0].answers["first"].prompt_logits, runs[1].answers["second"].prompt_logits)
