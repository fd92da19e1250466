"""Pages of keys inside a KV cache, read and written as plain tensors whatever their layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_evict.positions.rotary import Rotation
from vllm_evict.scores.cpu_layout import KeyLayout

_PAGES_AT_ONCE = 64
"""Pages that are turned together: bounds the fp32 copy (at 8 heads of 128 and 32 tokens: 8 MiB)."""


class KeyPages(Protocol):
    """The cache of one layer."""

    def copy(self, sources: torch.Tensor, blocks: torch.Tensor) -> None:
        """Copy keys and values, int64 ``[n]`` blocks each; all is read before anything is written."""

    def read(self, blocks: torch.Tensor) -> torch.Tensor:
        """Keys ``[n, num_kv_heads, page_tokens, head_size]`` of the blocks, int64 ``[n]``; a copy."""

    def write(self, blocks: torch.Tensor, keys: torch.Tensor) -> None:
        """The reverse."""


@dataclass(frozen=True)
class PackedKeyPages:
    """Of CPU attention, which packs each page of keys for its kernel.

    Args:
        kv_cache: ``[num_blocks, ...]``, keys and values.
        key_cache: the keys in it, ``[num_blocks, num_kv_heads, page_tokens, head_size]``, packed.
        layout: how.

    """

    kv_cache: torch.Tensor
    key_cache: torch.Tensor
    layout: KeyLayout

    def copy(self, sources: torch.Tensor, blocks: torch.Tensor) -> None:
        self.kv_cache[blocks] = self.kv_cache[sources]

    def read(self, blocks: torch.Tensor) -> torch.Tensor:
        return self.key_cache[blocks].flatten(2)[..., self.layout.offsets()]

    def write(self, blocks: torch.Tensor, keys: torch.Tensor) -> None:
        packed = torch.empty_like(keys).flatten(2)
        packed[..., self.layout.offsets().flatten()] = keys.flatten(2)
        self.key_cache[blocks] = packed.view_as(keys)


@dataclass(frozen=True)
class PlainKeyPages:
    """Of attention that keeps a token's keys as they are.

    Args:
        kv_cache: ``[num_blocks, ...]``, keys and values, any strides.
        key_cache: a view of the keys in it, ``[num_blocks, num_kv_heads, page_tokens, head_size]``.

    """

    kv_cache: torch.Tensor
    key_cache: torch.Tensor

    def copy(self, sources: torch.Tensor, blocks: torch.Tensor) -> None:
        self.kv_cache[blocks] = self.kv_cache[sources]

    def read(self, blocks: torch.Tensor) -> torch.Tensor:
        return self.key_cache[blocks]

    def write(self, blocks: torch.Tensor, keys: torch.Tensor) -> None:
        self.key_cache[blocks] = keys


def move_pages(pages: KeyPages, rotation: Rotation, blocks: torch.Tensor, positions_down: torch.Tensor) -> None:
    """Turn whole pages of keys in place; slots that hold no token yet turn too, which nobody sees.

    Args:
        pages: the layer's cache.
        rotation: the layer's.
        blocks: int64 ``[n]``, each once.
        positions_down: int64 ``[n]`` by how far each goes down.

    """
    for some, down in zip(blocks.split(_PAGES_AT_ONCE), positions_down.split(_PAGES_AT_ONCE), strict=True):
        pages.write(some, rotation.move(pages.read(some), down[:, None, None]))
