"""What goes together with KV eviction, as docs/compatibility.md says it.

The refusals are those that the code refuses from. Write the file anew with

    python -m vllm_evict.engine.compatibility docs/compatibility.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from vllm_evict.engine.support import LAYER_REFUSALS, REFUSALS, TESTED_VLLM, Refusal
from vllm_evict.policies import POLICIES

# Feature: the tests that prove it, as pytest names them without parameters.
SUPPORTED: dict[str, tuple[str, ...]] = {
    "prefix caching": (
        "tests/engine/test_prefix.py::test_nothing_computed_after_a_hole_is_found",
        "tests/engine/test_prefix.py::test_hit_longer_than_the_budget",
    ),
    "chunked prefill": ("tests/engine/test_limits.py::test_chunk_larger_than_the_budget",),
    "continuous batching": ("tests/engine/test_batch.py::test_alone_and_in_company",),
    "preemption and resume": ("tests/engine/test_preemption.py::test_run",),
    "eviction before preemption (--kv-eviction-floor)": (
        "tests/bookkeeping/test_pressure.py::test_pages_go_before_work_does",
        "tests/engine/test_wishes.py::test_under_pressure_answers_are_those_of_the_mask",
    ),
    "policy, budget and pinned spans per request (vllm_xargs)": (
        "tests/serve/test_reporting.py::test_a_lower_budget",
        "tests/serve/test_reporting.py::test_a_pinned_span",
        "tests/serve/test_reporting.py::test_a_wish_that_cannot_be_granted_is_a_400",
    ),
    "report to the client": (
        "tests/serve/test_reporting.py::test_above_the_budget_the_trace_agrees",
        "tests/serve/test_reporting.py::test_a_stream_says_it_on_the_usage_chunk",
    ),
    "metrics": (
        "tests/serve/test_reporting.py::test_metrics_are_what_the_trace_says",
        "tests/engine/test_wishes.py::test_offline_runs_have_metrics",
    ),
    "priority scheduling (--scheduling-policy priority)": (
        "tests/features/test_pressure.py::test_the_least_important_is_preempted_first",
        "tests/features/test_pressure.py::test_an_important_latecomer",
    ),
    "--watermark, --no-scheduler-reserve-full-isl, --long-prefill-token-threshold, --max-num-active-seqs": (
        "tests/features/test_pressure.py::test_other_ways_to_admit",
    ),
    "streamed answers": ("tests/features/test_pressure.py::test_what_was_streamed_stands",),
    "sessions fed in pieces (streaming input)": ("tests/features/test_inputs.py::test_a_session_fed_in_pieces",),
    "several samples (n), seeds": (
        "tests/features/test_sampling.py::test_four_branches_evict_each_for_itself",
        "tests/features/test_sampling.py::test_branches_taken_back",
        "tests/features/test_sampling.py::test_a_seed_gives_the_tokens_of_plain_vllm_below_the_budget",
    ),
    "penalties, logit bias": ("tests/features/test_sampling.py::test_penalties_and_bias",),
    "logprobs": ("tests/features/test_sampling.py::test_logprobs_are_those_of_the_masked_forward",),
    "prompt_logprobs, echo": (
        "tests/engine/test_prompt_logits.py::test_every_prompt_token",
        "tests/serve/test_answers.py::test_logprobs_of_a_prompt_over_the_budget",
    ),
    "stop strings": ("tests/features/test_sampling.py::test_a_stop_string_across_an_eviction",),
    "structured output (xgrammar, guidance, outlines)": (
        "tests/features/test_structured.py::test_json_and_regex_beside_free_text",
    ),
    "LoRA": ("tests/features/test_lora.py::test_two_adapters_and_none_in_one_batch",),
    "reset of the prefix cache": (
        "tests/features/test_reset_sleep.py::test_after_a_reset_the_answer_is_that_of_a_cold_engine",
        "tests/features/test_reset_sleep.py::test_forced_while_somebody_runs",
    ),
    "sleep and wake (on CPU, where vLLM keeps the memory)": (
        "tests/features/test_reset_sleep.py::test_sleep_with_a_request_kept",
        "tests/features/test_reset_sleep.py::test_sleep_that_drops_everybody",
    ),
    "MHA, GQA, MQA": ("tests/engine/test_scores.py::test_heads",),
    "layers with different numbers of KV heads": (
        "tests/features/test_kinds.py::test_layers_with_different_numbers_of_kv_heads",
    ),
    "rotary positions, full and partial": ("tests/engine/test_cycles.py::test_many_cycles",),
    "learned positions; attention logits with a soft cap": ("tests/features/test_kinds.py::test_served_with_proof",),
    "learned attention sinks (policies that do not watch attention)": (
        "tests/features/test_kinds.py::test_learned_sinks_of_policies_that_do_not_watch_attention",
    ),
    "sliding-window layers beside full ones (Gemma 2, Gemma 3)": (
        "tests/engine/test_hybrid.py::test_sliding_layers_keep_their_own_window",
        "tests/features/test_gemma.py::test_a_random_one",
        "tests/features/test_gemma.py::test_the_real_one",
    ),
    "models of transformers (--model-impl transformers)": (
        "tests/features/test_kinds.py::test_models_in_the_words_of_transformers",
    ),
    "both model runners, asynchronous scheduling": (
        "tests/triton/test_engines.py::test_run",
        "tests/triton/test_engines.py::test_both_runners_say_the_same",
        "tests/bookkeeping/test_runtime.py::test_every_score_comes_back_to_its_page_and_request",
    ),
    "attention backends TRITON_ATTN, FLASH_ATTN, FLASHINFER, XFORMERS": (
        "tests/triton/test_engines.py::test_run",
        "tests/triton/test_builders.py::test_run",
        "tests/triton/test_xformers.py::test_engine",
    ),
    "CUDA graphs": (
        "tests/triton/test_builders.py::test_graph_support",
        "tests/triton/test_builders.py::test_a_graph_captures_and_replays_these_buffers",
        "tests/triton/test_engines.py::test_replayed_graphs_change_nothing",
    ),
    "requests past the model's length (--kv-eviction-positions rebase)": (
        "tests/engine/test_rebase.py::test_run",
        "tests/engine/test_rebase.py::test_kinds",
        "tests/engine/test_rebase.py::test_a_hit_is_copied_while_others_hold_it",
        "tests/engine/test_rebase.py::test_branches_move_each_for_itself",
        "tests/engine/test_rebase.py::test_preemption_starts_over",
        "tests/engine/test_rebase.py::test_prompt_logprobs_past_the_limit",
        "tests/serve/test_ranks.py::test_two_tensor_parallel_ranks_move_the_same_pages",
    ),
    "fp32, bf16, fp16": ("tests/engine/test_half.py::test_error_is_that_of_the_number_format",),
    "tensor parallelism": (
        "tests/serve/test_ranks.py::test_two_tensor_parallel_ranks_decide_as_one",
        "tests/serve/test_ranks.py::test_a_heavy_hitter_that_one_rank_sees",
    ),
    "pipeline parallelism": (
        "tests/serve/test_pipeline.py::test_two_stages_decide_as_one_rank",
        "tests/serve/test_pipeline.py::test_a_heavy_hitter_that_the_first_stage_sees",
        "tests/bookkeeping/test_pipeline.py::test_two_steps_in_flight_decide_as_one",
    ),
    "several API servers (--api-server-count)": ("tests/serve/test_ranks.py::test_two_api_servers",),
    "data parallelism": ("tests/serve/test_ranks.py::test_two_data_parallel_engines",),
    "vLLM's statistics and residency metrics (--kv-cache-metrics)": (
        "tests/features/test_numbers.py::test_whoever_looks_at_specs_and_blocks_copes_with_ours",
    ),
}

_HEAD = f"""\
# What goes together with KV eviction

Written by `python -m vllm_evict.engine.compatibility` from the tables that the code refuses from; do not edit.
vLLM {", ".join(f"{version}.*" for version in TESTED_VLLM)}. Policies: {", ".join(f"`{name}`" for name in POLICIES)}.
`vllm-evict doctor MODEL -- OPTIONS` says which of these lines apply to a model and its options.
"""


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _refusal_row(refusal: Refusal) -> str:
    policies = ", ".join(f"`{name}`" for name in refusal.policies) or "all"
    return _row(refusal.feature, policies, refusal.why, refusal.instead)


def render() -> str:
    """The document."""
    lines = [_HEAD, "## Supported", "", _row("feature", "tests"), _row("---", "---")]
    lines += [_row(feature, "<br>".join(f"`{test}`" for test in tests)) for feature, tests in SUPPORTED.items()]
    refused = [_row("feature", "policies", "why", "way out"), _row("---", "---", "---", "---")]
    lines += ["", "## Refused at start, before weights load", "", *refused, *map(_refusal_row, REFUSALS)]
    lines += ["", "## Refused at start, seen in the model's layers", "", *refused, *map(_refusal_row, LAYER_REFUSALS)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render())
