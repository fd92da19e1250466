"""C44: kinds of attention. Each is served with the oracle's proof, or refused by its name before weights load."""

from __future__ import annotations

import multiprocessing

import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.engine import checks
from tests.engine.harness import PAGE_TOKENS as P
from tests.engine.harness import random_prompt
from tests.models.kinds import config_only, tiny_learned, tiny_sinks, tiny_softcap, tiny_uneven
from vllm_evict.config import CONFIG_KEY, EvictionConfigError
from vllm_evict.engine.plugin import register

POLICIES = ["streaming", "h2o"]
SERVED = {"learned positions": (tiny_learned, 1), "logit softcap, windows in turn": (tiny_softcap, 2)}

# Kind: what the refusal calls it.
REFUSED = {
    "MLA": "multi-head latent attention",
    "encoder-decoder": "encoder-decoder",
    "SSM hybrid": "state-space or linear-attention layers",
    "SSM alone": "state-space or linear-attention layers",
    "linear attention": "state-space or linear-attention layers",
    "M-RoPE": "M-RoPE",
    "ALiBi": "ALiBi",
    "chunked local attention": "chunked local attention",
    "encoder only": "pooling",
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", SERVED)
def test_served_with_proof(engine, tmp_path, kind, policy):
    build, num_groups = SERVED[kind]
    prompts = {"a": random_prompt(9 * P + 3, seed=1), "b": random_prompt(P, seed=2)}
    eviction = {"policy": policy, "budget": 4 * P}
    with engine(build(tmp_path), eviction=eviction, num_pages=200, max_model_len=1024) as served:
        run = served.run(prompts, max_tokens=5 * P)
        assert len(served.runner.kv_cache_config.kv_cache_groups) == num_groups
    # Another group shares the pool, whose pages no table of ours names.
    skipped = (checks.pool, checks.written_once) if num_groups > 1 else ()
    for check in checks.ALWAYS:
        if check not in skipped:
            check(run)
    if policy == "h2o":
        checks.masses(run)


@pytest.mark.parametrize("policy", POLICIES)
def test_layers_with_different_numbers_of_kv_heads(engine, tmp_path, policy):
    """vLLM wraps the specs of such layers into one: we look inside."""
    uneven, even = tiny_uneven(tmp_path)
    with engine(uneven, eviction={"policy": policy, "budget": 4 * P}) as served:
        run = served.run({"a": random_prompt(9 * P + 3, seed=1), "b": random_prompt(P, seed=2)}, max_tokens=5 * P)
        (group,) = served.runner.kv_cache_config.kv_cache_groups
        assert type(group.kv_cache_spec).__name__ == "UniformTypeKVCacheSpecs"
    run.model = even
    for check in checks.ALWAYS:
        check(run)
    if policy == "h2o":
        checks.masses(run)


@pytest.mark.parametrize("policy", ["streaming", "keydiff"])
def test_learned_sinks_of_policies_that_do_not_watch_attention(engine, tmp_path, policy):
    path, oracle = tiny_sinks(tmp_path)
    with engine(path, eviction={"policy": policy, "budget": 4 * P}) as served:
        run = served.run({"a": random_prompt(9 * P + 3, seed=1), "b": random_prompt(P, seed=2)}, max_tokens=3 * P)
    run.oracle = oracle()
    for check in checks.ALWAYS:
        check(run)


@pytest.mark.parametrize("policy", POLICIES)
def test_models_in_the_words_of_transformers(engine, models, policy):
    """`--model-impl transformers`: the same layers, called by other code. (vLLM changes their classes.)"""

    def in_a_process_of_its_own(answer):
        with engine(eviction={"policy": policy, "budget": 4 * P}, model_impl="transformers") as served:
            prompts = {"a": random_prompt(9 * P + 3, seed=1), "b": random_prompt(P, seed=2)}
            answer.send(served.run(prompts, max_tokens=3 * P))

    models("tiny")
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=in_a_process_of_its_own, args=(there,))
    process.start()
    there.close()  # so that the end of the process is the end of what can be received
    run = here.recv()
    process.join(timeout=30)
    assert process.exitcode == 0
    for check in checks.ALWAYS:
        check(run)


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_kind_before_weights_load(tmp_path, kind):
    """There are no weights to load."""
    register()
    model = str(config_only(tmp_path, kind))
    options = {"model": model, "skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True}
    assert EngineArgs(**options).create_engine_config()  # vLLM itself takes it
    for policy in POLICIES:
        with pytest.raises(EvictionConfigError, match="does not work with") as error:
            EngineArgs(**options, additional_config={CONFIG_KEY: {"policy": policy}}).create_engine_config()
        assert f"--kv-eviction {policy} does not work with" in str(error.value) and REFUSED[kind] in str(error.value)
        assert "\n" not in str(error.value)


def test_refused_by_what_a_layer_has(engine, tmp_path):
    """Not every config tells: sinks that take attention which h2o would not see."""
    path, _ = tiny_sinks(tmp_path)
    for policy in ("h2o", "h2o-keydiff"):
        with pytest.raises(EvictionConfigError, match=f"{policy} does not work with learned attention sinks"):
            engine(path, eviction={"policy": policy, "budget": 4 * P})
