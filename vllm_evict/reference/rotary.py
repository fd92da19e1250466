"""Rotary positions inside the cache: count the tokens still held instead of those seen.

A rotary key of position p is R(p) k, and R(a) R(b) = R(a + b). A key stays in the cache as it was written, R(w) k;
when it has moved down to position p, attention gets R(p - w) R(w) k. Nothing is rotated twice, so errors do not add up.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

_LENGTH_DEPENDENT = ("dynamic", "longrope")


class CacheRotary:
    """Rotates with the model's own code, whatever its layout (halves, interleaved, partial).

    Args:
        model: the Hugging Face model.
        attention: one of its attention modules; its source file defines ``apply_rotary_pos_emb``.

    Raises:
        ValueError: the model has no rotary positions, or frequencies that depend on the length.

    """

    def __init__(self, model: nn.Module, attention: nn.Module):
        found = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "rotary_emb"]
        self._apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
        if len(found) != 1 or self._apply is None:
            raise ValueError(
                f"positions='cache' needs a model with one rotary embedding; {type(model).__name__} has {len(found)}. "
                "Use positions='original'."
            )
        self._embedding = found[0]
        rope_type = getattr(self._embedding, "rope_type", "default")
        if rope_type in _LENGTH_DEPENDENT:
            raise ValueError(
                f"positions='cache' cannot move keys of rope type {rope_type!r}, whose frequencies change with the "
                "length. Use positions='original'."
            )

    def embeddings(self, hidden_states: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine ``[batch, num_tokens, rotary_size]`` of ``positions``, long ``[batch, num_tokens]``."""
        return self._embedding(hidden_states, position_ids=positions)

    def move(self, keys: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
        """Keys rotated on by ``distance`` positions.

        Args:
            keys: ``[batch, num_kv_heads, num_slots, head_size]``
            distance: long ``[batch, num_kv_heads, num_slots]``, negative = down.

        """
        flat = keys.flatten(0, 1)[:, None]  # [batch * num_kv_heads, 1, num_slots, head_size]
        cos, sin = self.embeddings(flat, distance.flatten(0, 1))
        scale = getattr(self._embedding, "attention_scaling", 1.0)  # yarn's factor is in the key already
        rotary_size = cos.shape[-1]
        turned, _ = self._apply(flat[..., :rotary_size], flat[..., :rotary_size], cos / scale, sin / scale)
        return torch.cat([turned, flat[..., rotary_size:]], dim=-1).view_as(keys)
