"""Capability 4: structured output while pages go. The grammar filters the logits of the kept tokens, nothing else."""

from __future__ import annotations

import json
import re

import pytest
import torch
from vllm.sampling_params import StructuredOutputsParams

from tests.engine import checks
from tests.engine.harness import PAGE_TOKENS as P
from tests.engine.harness import Run, random_prompt
from tests.models.text import END_OF_TEXT

NAME = {"type": "string", "minLength": 120, "maxLength": 140}
SCHEMA = {
    "type": "object",
    "properties": {"name": NAME, "size": {"type": "integer", "enum": [4, 32, 128]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
# Where a grammar allows spaces between the parts of JSON, a random model may write nothing else.
BACKENDS = {
    "xgrammar": {"disable_any_whitespace": True},
    "guidance": {"disable_any_whitespace": True},
    "outlines": {},
}
REGEX = "[a-f]{80}(-[0-9]{4}){8}"


def obeys_and_is_the_best_allowed(run: Run, name: str) -> None:
    """Masked-out logits come back as -inf; the finite ones are the oracle's, and the token is the first among them."""
    answer = run.answers[name]
    expected = run.reference(name, 0).logits[len(answer.prompt) - 1 : -1]
    for index, (tokens, logits) in enumerate(zip(answer.logit_tokens, answer.logits, strict=True)):
        allowed = logits.isfinite()
        assert 0 < allowed.sum() <= len(logits)
        torch.testing.assert_close(logits[allowed], expected[index][tokens[allowed]], atol=1e-4, rtol=0)
        best = expected[index][tokens[allowed]].max()
        assert best - expected[index][answer.tokens[index]] <= 2 * checks.LOGIT_TOLERANCE
    assert not answer.logits.isfinite().all()  # the grammar did forbid something


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("policy", ["streaming", "h2o"])
def test_json_and_regex_beside_free_text(speaking, policy, backend):
    structured = {
        "json": StructuredOutputsParams(json=SCHEMA),
        "regex": StructuredOutputsParams(regex=REGEX),
        "free": None,
    }
    config = {"backend": backend} | BACKENDS[backend]
    with speaking(eviction={"policy": policy, "budget": 3 * P}, structured_outputs_config=config) as served:
        served.begin()
        for number, (name, params) in enumerate(structured.items()):
            sampling = {"detokenize": True, "ignore_eos": False, "structured_outputs": params}
            served.add(
                name, random_prompt(2 * P + number, seed=number), max_tokens=300, num_logits=-1, sampling=sampling
            )
        run = served.drain()
    answers = run.answers
    said = json.loads(answers["json"].text)
    assert sorted(said) == ["name", "size"] and 120 <= len(said["name"]) <= 140 and said["size"] in (4, 32, 128)
    assert re.fullmatch(REGEX, answers["regex"].text)
    for name in ("json", "regex"):
        assert answers[name].finish_reason == "stop" and answers[name].tokens[-1] == END_OF_TEXT
        assert len(run.lines(name)) >= 2  # pages went while the grammar was at work
        obeys_and_is_the_best_allowed(run, name)
    for check in checks.ALWAYS:
        if check not in (checks.logits, checks.greedy_tokens):
            check(run)
    run.answers = {"free": answers["free"]}
    checks.logits(run)
    checks.greedy_tokens(run)
