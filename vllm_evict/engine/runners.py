"""What eviction needs of vLLM's model runners, and where the two differ."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import CommonAttentionMetadata

Lower = Callable[[torch.Tensor], None]
"""Makes the step's positions in the text rotary ones, in place: int64 ``[tokens of the step and padding]``."""


class RunnerAdapter(Protocol):
    """A model runner, as eviction sees it."""

    def request_ids(self, batch: CommonAttentionMetadata) -> Sequence[str]:
        """The batch's requests, row by row."""

    def run_at(self, num_tokens: int, first_position: int) -> None:
        """Run the model on made-up tokens from that position on, without reading a KV cache."""

    def lower_positions(self, lower: Lower) -> None:
        """From now on give the model rotary positions; the slot mapping and the sampler keep those in the text."""


class V1Runner:
    """``vllm.v1.worker.gpu_model_runner``, which the CPU's runner is as well."""

    def __init__(self, runner) -> None:
        self._runner = runner

    def request_ids(self, batch: CommonAttentionMetadata) -> Sequence[str]:
        return self._runner.input_batch.req_ids[: batch.num_reqs]

    def run_at(self, num_tokens: int, first_position: int) -> None:
        positions = self._runner.positions
        positions[:num_tokens] = torch.arange(first_position, first_position + num_tokens)
        # A graph that is being captured computes nothing.
        self._runner._dummy_run(num_tokens, cudagraph_runtime_mode=CUDAGraphMode.NONE)
        positions[:num_tokens] = 0

    def lower_positions(self, lower: Lower) -> None:
        # In place: the runner computes its positions anew in every step, and reads them no more after this.
        forward = self._runner._model_forward

        @functools.wraps(forward)
        def forward_at_rotary_positions(*args, positions, **kwargs):
            lower(positions)
            return forward(*args, positions=positions, **kwargs)

        self._runner._model_forward = forward_at_rotary_positions


class V2Runner:
    """``vllm.v1.worker.gpu.model_runner``. Its positions are read by the sampler, so the model gets others."""

    def __init__(self, runner) -> None:
        self._runner = runner

    def request_ids(self, batch: CommonAttentionMetadata) -> Sequence[str]:
        known = self._runner.req_states.index_to_req_id
        return [known[index] for index in batch.req_idx.tolist()]

    def run_at(self, num_tokens: int, first_position: int) -> None:
        state = self._runner.model_state
        positions = torch.arange(first_position, first_position + num_tokens, device=self._runner.device)
        state.prepare_inputs = lambda batch, req_states: {"positions": positions}
        try:
            self._runner._dummy_run(num_tokens, skip_attn=True, is_profile=True)
        finally:
            del state.prepare_inputs

    def lower_positions(self, lower: Lower) -> None:
        state = self._runner.model_state
        # A CUDA graph goes on reading the tensor that it was captured with.
        rotary = torch.zeros_like(self._runner.input_buffers.positions)
        prepare_inputs, prepare_dummy_inputs = state.prepare_inputs, state.prepare_dummy_inputs

        @functools.wraps(prepare_inputs)
        def prepare_rotary_positions(batch, req_states):
            positions = rotary[: len(batch.positions)]
            positions.copy_(batch.positions)
            positions[batch.num_tokens :].zero_()  # padding: what an earlier step left there, as in the text
            lower(positions)
            return {**prepare_inputs(batch, req_states), "positions": positions}

        @functools.wraps(prepare_dummy_inputs)
        def prepare_dummy_positions(num_reqs: int, num_tokens: int):
            return {**prepare_dummy_inputs(num_reqs, num_tokens), "positions": rotary[:num_tokens]}

        state.prepare_inputs, state.prepare_dummy_inputs = prepare_rotary_positions, prepare_dummy_positions


def adapter_of(runner) -> RunnerAdapter:
    """Which of the two it is."""
    return V2Runner(runner) if hasattr(runner, "model_state") else V1Runner(runner)
