"""What differs between vLLM's model runners, on stand-ins that have only what eviction touches."""

from types import SimpleNamespace

import torch
from vllm.config import CUDAGraphMode

from vllm_evict.engine.runners import V1Runner, V2Runner


def test_v2_padding_tokens_stand_at_0():
    """vLLM leaves there what an earlier step put, positions in the text, which may be far past the rotary table."""
    state = SimpleNamespace(
        prepare_inputs=lambda batch, req_states: {},
        prepare_dummy_inputs=lambda num_reqs, num_tokens: {},
    )
    buffers = SimpleNamespace(positions=torch.zeros(16, dtype=torch.int64))
    V2Runner(SimpleNamespace(model_state=state, input_buffers=buffers)).lower_positions(lambda positions: None)
    buffers.positions[:8] = torch.arange(100_000, 100_008)
    batch = SimpleNamespace(positions=buffers.positions[:8], num_tokens=3)
    positions = state.prepare_inputs(batch, None)["positions"]
    assert positions.tolist() == [100_000, 100_001, 100_002, 0, 0, 0, 0, 0]


def test_v1_probes_without_a_graph():
    """A graph that is being captured computes nothing, and one that is replayed does not look who attends."""
    modes = []
    runner = SimpleNamespace(
        positions=torch.zeros(16, dtype=torch.int64),
        _dummy_run=lambda num_tokens, cudagraph_runtime_mode=None: modes.append(cudagraph_runtime_mode),
    )
    V1Runner(runner).run_at(8, 1000)
    assert modes == [CUDAGraphMode.NONE]
