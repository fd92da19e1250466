"""The workers' side of `--kv-eviction-positions rebase`: keys in the caches move, and so do the positions of a step.

What depends on the model runner is in `runners`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding

from vllm_evict.config import EvictionConfigError, flag_name
from vllm_evict.engine.host_copy import to_device
from vllm_evict.engine.resident import PageMoves, ResidentRequest
from vllm_evict.positions.pages import KeyPages, move_pages
from vllm_evict.positions.rotary import Rotation

_PROBED_TOKENS = 8
_PROBE_TOLERANCE = 0.05
"""Of a key's length. Rounding to bf16 costs .01 and fp32 tables .01 at position 131,072; a wrong rotation about 1."""


class RotaryPositions:
    """One per worker.

    Args:
        page_tokens: tokens in a page.
        layers: cache and rotation of each layer whose keys are written.
        device: of the caches.

    """

    def __init__(self, page_tokens: int, layers: Sequence[tuple[KeyPages, Rotation]], device: torch.device) -> None:
        self._page_tokens = page_tokens
        self._layers = layers
        self._device = device

    def carry_out(self, moves: Sequence[PageMoves]) -> None:
        """Copy and turn pages, before the forward pass of the step that decided it."""
        for move in moves:
            sources, copies = self._on_device(move.sources), self._on_device(move.copies)
            blocks, positions_down = (
                self._on_device(move.block_ids),
                self._on_device(move.pages_down * self._page_tokens),
            )
            for pages, rotation in self._layers:
                if len(copies):
                    pages.copy(sources, copies)
                move_pages(pages, rotation, blocks, positions_down)

    def _on_device(self, numbers: np.ndarray) -> torch.Tensor:
        return to_device(numbers.astype(np.int64), self._device)

    def lower(self, positions: torch.Tensor, requests: Sequence[ResidentRequest]) -> None:
        """Make positions in the text rotary ones, in place.

        Args:
            positions: int64 ``[tokens of the step and padding]``, by request in the order of the batch.
            requests: of the batch, in its order.

        """
        offset_pages = np.asarray([request.offset_pages for request in requests], dtype=np.int64)
        if not offset_pages.any():
            return
        num_tokens = [request.num_scheduled_tokens for request in requests]
        offsets = self._on_device(np.repeat(offset_pages * self._page_tokens, num_tokens))
        positions[: len(offsets)] -= offsets


def rotations_of(model: nn.Module, layers: Mapping[str, nn.Module], model_tokens: int) -> dict[str, Rotation]:
    """How the keys of each attention layer turn, by the rotary object that stands beside it in the model.

    Args:
        model: as loaded.
        layers: its attention layers by name.
        model_tokens: positions that will be used.

    Raises:
        EvictionConfigError: there is none, or one that cannot be moved.

    """
    owner = {child: module for module in model.modules() for child in module.children()}
    rotations: dict[nn.Module, Rotation] = {}
    found = {}
    for name, layer in layers.items():
        beside = owner[layer].children() if layer in owner else ()
        rotaries = {module for module in beside if _looks_rotary(module)}
        if len(rotaries) != 1:
            raise _refusal(f"the positions of layer {name}", "no rotary embedding was found beside it")
        [rotary] = rotaries
        if rotary not in rotations:
            rotations[rotary] = _rotation(rotary, name, model_tokens)
        found[name] = rotations[rotary]
    return found


def _looks_rotary(module: nn.Module) -> bool:
    return isinstance(module, RotaryEmbeddingBase) or "Rotary" in type(module).__name__


def _rotation(rotary: nn.Module, name: str, model_tokens: int) -> Rotation:
    kind = type(rotary).__name__
    if isinstance(rotary, MRotaryEmbedding):
        raise _refusal(f"M-RoPE ({kind} in layer {name})", "its positions have several axes")
    if not isinstance(rotary, RotaryEmbeddingBase):
        raise _refusal(f"{kind} (layer {name})", "its frequencies depend on the length, or are not known")
    table = rotary._compute_cos_sin_cache().float()  # its own may be rounded to bf16
    if len(table) < model_tokens:
        raise _refusal(f"{kind} (layer {name})", f"its table has {len(table)} positions, the model {model_tokens}")
    try:
        return Rotation.of_table(table, interleaved=not rotary.is_neox_style)
    except ValueError as error:
        raise _refusal(f"{kind} (layer {name})", str(error)) from None


def check_keys_turn(
    run_at: Callable[[int, int], None],
    layers: Mapping[str, nn.Module],
    rotations: Mapping[str, Rotation],
    model_tokens: int,
) -> None:
    """Prove on the loaded model that a key which is moved is the key that would have been written there.

    Models differ in what they do besides: layers without positions, a norm after the rotation, learned positions.

    Args:
        run_at: runs the model on that many tokens from that position on, without a KV cache.
        layers: attention layers by name.
        rotations: theirs.
        model_tokens: positions that the model was made for.

    Raises:
        EvictionConfigError: naming the first layer whose keys do not turn as its rotary embedding says.

    """
    first = model_tokens - _PROBED_TOKENS
    with _recorded_keys(layers) as at_the_end:
        run_at(_PROBED_TOKENS, first)
    with _recorded_keys(layers) as at_the_start:
        run_at(_PROBED_TOKENS, 0)
    for name, rotation in rotations.items():
        moved = rotation.move(at_the_end[name].float(), torch.tensor(first))
        written = at_the_start[name].float()
        off = ((moved - written).norm(dim=-1) / written.norm(dim=-1)).max().item()
        if not off <= _PROBE_TOLERANCE:
            raise _refusal(
                f"layer {name}", f"its keys do not turn with the position as its rotary embedding says ({off:.2g} off)"
            )


@contextmanager
def _recorded_keys(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, torch.Tensor]]:
    """Within the block attention answers zeros, so that nothing depends on the position but the keys: ``{layer: keys
    [tokens, num_kv_heads, head_size]}``."""
    keys: dict[str, torch.Tensor] = {}

    def record_as(name: str):
        def forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs):
            keys[name] = key[:_PROBED_TOKENS].detach().clone()
            return output.zero_()

        return forward

    for name, layer in layers.items():
        layer.impl.forward = record_as(name)
    try:
        yield keys
    finally:
        for layer in layers.values():
            del layer.impl.forward


def _refusal(what: str, why: str) -> EvictionConfigError:
    return EvictionConfigError(
        f"{flag_name('positions')} rebase does not work with {what}: {why}. "
        f"Way out: serve this model with {flag_name('positions')} absolute."
    )
