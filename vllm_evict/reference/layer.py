"""What one layer's cache holds: keys, values, and for each where it came from."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers.cache_utils import DynamicLayer

_PER_SLOT = ("positions", "written_at", "scores")


class EvictingLayer(DynamicLayer):
    """A growing cache whose slots can be dropped, each head its own.

    ``keys`` and ``values`` are ``[batch, num_kv_heads, num_slots, head_size]``. Beside them, all
    ``[batch, num_kv_heads, num_slots]``:

    - ``positions`` long: the token's place in its text, padding not counted; -1 for padding.
    - ``written_at`` long: the position its key was rotated for.
    - ``scores`` double: attention received so far (H2O).

    ``cumulative_length`` counts every token that came by, padding and evicted ones too: transformers takes
    the next token's position and the width of the padding mask from it.
    """

    is_croppable = False

    def __init__(self, num_kv_heads: int):
        super().__init__()
        self.num_kv_heads = num_kv_heads
        self.reset()

    def reset(self) -> None:
        super().reset()
        self.cumulative_length = 0
        self.positions = self.written_at = self.scores = None

    @property
    def num_slots(self) -> int:
        return 0 if self.positions is None else self.positions.shape[-1]

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Mask columns, and the text place of the first: right for the new tokens, which is all we read from it."""
        return self.num_slots + query_length, self.cumulative_length - self.num_slots

    def append(self, real: torch.Tensor) -> None:
        """Make a slot for each token of a step, before its key comes. ``real``: bool ``[batch, num_new]``."""
        if self.positions is None:
            empty = real.new_zeros((real.shape[0], self.num_kv_heads, 0), dtype=torch.long)
            self.positions, self.written_at, self.scores = empty, empty, empty.double()
        # [batch, num_kv_heads, num_new]; the newest token is never evicted, so the next one's place is known.
        rank = (real.cumsum(dim=-1) - 1)[:, None, :].expand(-1, self.num_kv_heads, -1)
        pad = ~real[:, None, :]
        num_seen = _cat(self.positions, torch.full_like(rank[..., :1], -1)).amax(dim=-1, keepdim=True) + 1
        num_held = (self.positions >= 0).sum(dim=-1, keepdim=True)
        self.positions = _cat(self.positions, (num_seen + rank).masked_fill(pad, -1))
        self.written_at = _cat(self.written_at, (num_held + rank).masked_fill(pad, 0))
        self.scores = _cat(self.scores, torch.zeros_like(rank, dtype=torch.double))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.cumulative_length += key_states.shape[-2]
        return super().update(key_states, value_states, *args, **kwargs)

    def cache_positions(self) -> torch.Tensor:
        """The place of each slot's token among the tokens still held: long ``[batch, num_kv_heads, num_slots]``."""
        real = self.positions >= 0
        return (real.cumsum(dim=-1) - 1).masked_fill(~real, 0)

    def keep(self, slots: torch.Tensor) -> None:
        """Drop all but ``slots``: long ``[batch, num_kv_heads, num_kept]``, ascending."""
        rows = slots[..., None].expand(-1, -1, -1, self.keys.shape[-1])
        self.keys = self.keys.gather(2, rows)
        self.values = self.values.gather(2, slots[..., None].expand(-1, -1, -1, self.values.shape[-1]))
        self._each(lambda tensor: tensor.gather(2, slots))

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError(
            "a cache that evicts cannot be rolled back: what was evicted is gone. "
            "Generate without assisted or speculative decoding."
        )

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._each(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._each(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._each(lambda tensor: tensor[indices])

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.positions is not None:
            for name in _PER_SLOT:
                setattr(self, name, change(getattr(self, name)))


def _cat(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return torch.cat([old, new], dim=-1)
