"""Two pipeline stages in processes of their own, on tiny models: what each sees of its layers counts."""

from __future__ import annotations

import pytest
import torch

from tests.models.plant import HEAVY, NUM_NEUTRAL_TOKENS, plant
from tests.models.tiny import tiny
from tests.serve.test_ranks import P, answers, serving

pytestmark = pytest.mark.serve

# vLLM's CPU worker prepares the second stage while it compiles, which it skips with --enforce-eager; nothing is
# compiled in earnest here.
TWO_STAGES = ("--pipeline-parallel-size", "2", "--no-enforce-eager", "-cc", '{"mode": 1, "backend": "eager"}')
NOT_COMPILED = {"TORCHDYNAMO_DISABLE": "1"}
# Of a longer prompt the second chunk starts before the scores of the first are in; one rank waits.
ONE_CHUNK = ("--max-num-batched-tokens", "512")


def test_a_heavy_hitter_that_the_first_stage_sees(tmp_path):
    """Of four layers only the second looks for it, the last of stage 0; the scheduler hears from stage 1."""
    heavy_page, num_tokens = 2, 9 * P
    prompt = torch.randint(0, NUM_NEUTRAL_TOKENS, (num_tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    prompt[heavy_page * P + 11] = HEAVY
    model = plant(tmp_path / "plant", layers=(1,), num_layers=4)
    with serving(model, tmp_path, "h2o", *ONE_CHUNK, *TWO_STAGES, **NOT_COMPILED) as server:
        assert "world_size=2 rank=1" in server.log
        answer = server.complete(prompt, P, extra_body={"ignore_eos": True})
        ((_, lines),) = server.trace(answer).items()
    assert lines and not any(heavy_page in line.pages for line in lines)
    assert all(heavy_page in line.resident for line in lines if line.num_computed_tokens > (heavy_page + 1) * P)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["h2o", "h2o-keydiff"])
def test_two_stages_decide_as_one_rank(tmp_path, policy):
    model = tiny(tmp_path / "tiny")
    found = {}
    for stages in ((), TWO_STAGES):
        folder = tmp_path / str(len(stages))
        folder.mkdir()
        with serving(model, folder, policy, *ONE_CHUNK, *stages, **NOT_COMPILED) as server:
            assert ("world_size=2 rank=1" in server.log) == bool(stages)
            found[stages] = answers(server)
    assert found[TWO_STAGES] == found[()]
    assert [bool(lines) for _, lines in found[()].values()] == [False, True, True, True]
