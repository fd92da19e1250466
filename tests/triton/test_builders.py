"""vLLM's CUDA backends, evicting: what their ops are handed, and whether attention over it is the oracle's.

Real engines and real metadata builders, with the CUDA ops alone replaced (`cuda_ops.py`).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine import checks
from tests.engine.harness import random_prompt
from tests.models.tiny import tiny_mqa
from tests.triton import children
from tests.triton.builders_child import Case, Evidence
from tests.triton.cuda_ops import AMPERE, HOPPER, Call

P = 16
STREAMING = {"policy": "streaming", "budget": 3 * P, "sink": P, "recent": P}
H2O = {"policy": "h2o", "budget": 3 * P, "sink": P, "recent": P, "score_every": 4, "prefill_queries": 8}
NATIVE = {"attention_config": {"use_trtllm_attention": False}}
PROMPTS = {"long": random_prompt(4 * P + 5, seed=1), "short": random_prompt(P - 2, seed=2)}
TOKENS = {"long": 14, "short": 20}
CASES = {
    "FA3": ("FLASH_ATTN", "V2", HOPPER, H2O, {}),
    "FA2": ("FLASH_ATTN", "V1", AMPERE, H2O, {}),
    "XQA": ("FLASHINFER", "V2", HOPPER, H2O, {}),
    "FlashInfer": ("FLASHINFER", "V1", HOPPER, H2O, NATIVE),
    "FlashInfer-streaming": ("FLASHINFER", "V2", AMPERE, STREAMING, {}),
    "Triton": ("TRITON_ATTN", "V2", HOPPER, STREAMING, {}),
}
OPS = {
    "FA3": {"flash_attn_varlen_func", "get_scheduler_metadata", "page_mass"},
    "FA2": {"flash_attn_varlen_func", "page_mass"},
    "XQA": {"prefill", "xqa", "page_mass"},
    "FlashInfer": {"prefill", "decode", "page_mass"},
    "FlashInfer-streaming": {"prefill", "decode"},
    "Triton": {"unified_attention"},
}


SPLIT = ("FLASHINFER", "V2", HOPPER, STREAMING | {"budget": 256}, {"page_tokens": 128, "chunk_tokens": 128})
"""FlashInfer reads pages of at most 64 tokens here, so vLLM hands it two for one of these."""


def case(name: str, model: Path, folder: Path) -> Case:
    backend, runner, capability, eviction, more = CASES.get(name, SPLIT)
    engine = {
        "model": model,
        "eviction": eviction,
        "trace": folder / f"{name}.jsonl",
        "page_tokens": P,
        "chunk_tokens": 2 * P,
        "num_pages": 32,
        "max_model_len": 15 * P,
        "max_num_seqs": 4,
    }
    run = {"prompts": PROMPTS, "max_tokens": TOKENS, "num_logits": -1}
    return Case(name, backend, runner, capability, engine | more, run)


@pytest.fixture(scope="module")
def everything(tmp_path_factory) -> dict[str, Evidence | str]:
    folder = tmp_path_factory.mktemp("builders")
    model, names = tiny_mqa(folder / "model"), [*CASES, "split"]
    cases = [case(name, model, folder) for name in names]
    return dict(zip(names, children.run("tests.triton.builders_child", folder, cases), strict=True))


@pytest.fixture(params=CASES)
def name(request) -> str:
    return request.param


@pytest.fixture
def seen(name, everything) -> Evidence:
    return everything[name]


def attention_calls(calls: list[Call]) -> list[Call]:
    return [call for call in calls if call.op not in ("get_scheduler_metadata", "page_mass")]


def tables(seen: Evidence) -> list[Call]:
    """Every call of an attention op that takes a block table."""
    return [call for calls in seen.steps for call in attention_calls(calls) if "block_table" in call.tensors]


@pytest.mark.parametrize("check", checks.ALWAYS, ids=lambda check: check.__name__)
def test_run(seen, check):
    check(seen.run)


def test_masses(name, seen):
    if "page_mass" in OPS[name]:
        assert checks.masses(seen.run) < checks.MASS_TOLERANCE


def test_ops_of_the_backend_ran(name, seen):
    assert {call.op for calls in seen.steps for call in calls} == OPS[name]


def test_attention_reads_resident_pages(seen):
    """In every layer, of every request of the step."""
    evicted = 0
    steps = [(step, calls) for step, calls in zip(seen.run.steps, seen.steps, strict=True) if step.rows]
    for step, calls in steps:
        resident = {
            tuple(block for block in row.table if block is not None): row.physical_tokens for row in step.rows.values()
        }
        evicted += sum(None in row.table for row in step.rows.values())
        read = [
            (table, length)
            for call in attention_calls(calls)
            for table, length in zip(call.tables, call.lengths, strict=True)
        ]
        assert set(read) == set(resident.items())
        num_layers = len(read) / len(resident)
        assert num_layers == 2
    assert evicted


def test_lengths_are_bounded_as_the_op_was_told(seen):
    bounded = [call for calls in seen.steps for call in calls if call.max_length is not None]
    for call in bounded:
        assert max(call.lengths) <= call.max_length <= max(5 * P, max(call.lengths))


def test_tensors_are_what_kernels_take(seen):
    for calls in seen.steps:
        for call in calls:
            for argument, tensor in call.tensors.items():
                assert tensor.dtype == (torch.float32 if argument == "page_mass" else torch.int32), (call.op, argument)
                if call.op != "page_mass":  # our kernel takes strides
                    assert tensor.contiguous, (call.op, argument)


def test_every_step_reads_the_same_buffers(seen):
    for call in tables(seen):
        for argument in ("block_table", "seq_lens"):
            assert call.tensors[argument].address == seen.buffers[argument]


def test_a_graph_captures_and_replays_these_buffers(name, seen):
    """Without requests too: idle data-parallel ranks run along."""
    if name.startswith("FlashInfer"):
        assert not seen.captured, "its own buffer of page indices is captured"
        addresses = {call.tensors["indices"].address for calls in seen.steps for call in attention_calls(calls)}
        assert len(addresses) == 1
        return
    for tensors in (seen.captured, seen.dummy):
        assert {argument: given.address for argument, given in tensors.items()} == seen.buffers
        assert all(given.dtype == torch.int32 and given.contiguous for given in tensors.values())
        assert {given.shape[0] for given in tensors.values()} == {3}


def test_table_is_as_wide_as_vllms(seen):
    """Some kernels take whole 128 tokens of pages at once, so vLLM pads its rows to that."""
    assert {call.tensors["block_table"].shape[1] * P % 128 for call in tables(seen)} <= {0}


def test_mass_is_asked_of_every_layer_when_queries_are_observed(name, seen):
    if "page_mass" not in OPS[name]:
        return
    for step, calls in zip(seen.run.steps, seen.steps, strict=True):
        observed = sum(
            len(set(range(row.num_computed_tokens, stop)) & set(checks.observed_queries(seen.run, name, 0, stop)))
            for name, row in step.rows.items()
            for stop in [row.num_computed_tokens + row.num_scheduled_tokens]
        )
        requests = [call.tensors for call in calls if call.op == "page_mass"]
        assert len(requests) == (2 if observed else 0)
        decodes = all(row.num_scheduled_tokens == 1 for row in step.rows.values())
        for tensors in requests:
            # Steps that a CUDA graph may replay list every row; see `decode_mass`.
            listed = len(step.rows) if decodes else observed
            assert tensors["page_mass"].shape[0] == listed
            assert tensors["page_mass"].shape[1] == tensors["block_table"].shape[1]
            assert tensors["block_table"].address == seen.buffers["block_table"]
            assert {tensors[argument].shape for argument in ("token", "row", "visible_tokens")} == {(listed,)}


@pytest.mark.parametrize("policy", ["streaming", "keydiff", "h2o", "h2o-keydiff"])
def test_graph_support(seen, policy):
    """Where attention is observed, a graph holds one query a request, and no part of a prompt."""
    stock, ours, wrapped, other = seen.support[policy]
    assert stock != "NEVER"
    assert ours == wrapped == ("UNIFORM_SINGLE_TOKEN_DECODE" if "h2o" in policy else stock)
    assert other == stock


def test_pages_that_the_kernel_splits_are_refused(everything):
    """Block tables of kernel pages hold other ids than the scheduler's."""
    message = everything["split"]
    assert isinstance(message, str)
    assert "FLASHINFER reads pages of 64 tokens" in message
    assert "--block-size 64" in message
