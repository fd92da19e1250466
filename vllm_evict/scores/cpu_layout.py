"""How the keys of one page lie in memory, found by writing known keys and looking where they land.

vLLM packs K for its attention kernel, differently per instruction set, and the packing is not part of any API. So it is
never assumed: `detect_key_layout` lets vLLM's own op write a page and reads the answer. One formula covers all of them,

    offset(token t, dim d) = (t // G) * G * head_size  +  (d // I) * G * I  +  (t % G) * I  +  d % I

with G = `token_group` and I = `dim_interleave`, in elements from the start of the page:
    vec, vec16, neon      G = block_size, I = 1           a transposed page, [head_size, block_size]
    amx, bf16 or fp16     G = 16, I = 2                   16 tokens, pairs of dims side by side
    row-major             I = head_size (G is arbitrary)  [block_size, head_size]
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

#: Interleaves the kernel has code for, besides row-major.
SUPPORTED_INTERLEAVES = (1, 2, 4)
#: A token group must hold a whole number of vectors this long (tokens).
SMALLEST_TOKEN_GROUP = 8


@dataclass(frozen=True)
class KeyLayout:
    """Where (token, dim) of one KV head lies inside a page; see the module's formula."""

    block_size: int
    head_size: int
    token_group: int
    dim_interleave: int

    def __post_init__(self) -> None:
        if self.block_size % self.token_group or self.token_group % SMALLEST_TOKEN_GROUP:
            raise ValueError(
                f"token_group={self.token_group} must divide block_size={self.block_size} "
                f"and be a multiple of {SMALLEST_TOKEN_GROUP}"
            )
        if self.dim_interleave not in (*SUPPORTED_INTERLEAVES, self.head_size) or self.head_size % self.dim_interleave:
            raise ValueError(
                f"dim_interleave={self.dim_interleave} must be one of {SUPPORTED_INTERLEAVES} "
                f"or head_size={self.head_size}, and divide head_size"
            )

    @property
    def is_row_major(self) -> bool:
        return self.dim_interleave == self.head_size

    def offsets(self) -> torch.Tensor:
        """int64 [block_size, head_size]: the offset of every (token, dim), in elements."""
        t = torch.arange(self.block_size)[:, None]
        d = torch.arange(self.head_size)[None, :]
        g, i = self.token_group, self.dim_interleave
        return (t // g) * (g * self.head_size) + (d // i) * (g * i) + (t % g) * i + d % i


def detect_key_layout(
    write_key: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None],
    *,
    block_size: int,
    head_size: int,
    dtype: torch.dtype,
    isa: str,
) -> KeyLayout:
    """Write known keys through vLLM's op into a scratch cache and return the layout they show.

    write_key(key, key_cache, slot_mapping) must store `key` [block_size, 2, head_size] at the int64 slots
    `slot_mapping` [block_size] of `key_cache` [2, 2, block_size, head_size] (blocks, KV heads, ...), as vLLM does
    during a forward pass. For vLLM 0.32 that is
        ops.cpu_attn_reshape_and_cache(key, torch.empty_like(key), key_cache, torch.empty_like(key_cache), slots, isa)
    `isa` only names the culprit in the error.
    Raises ValueError if the keys land anywhere that no KeyLayout describes.
    """
    num_blocks = num_kv_heads = 2
    page_elements = block_size * head_size
    shape = (block_size, num_kv_heads, head_size)
    # Two writes tell (token, dim) of every place: numbers small enough to be exact in any dtype, high and low digit.
    element = torch.arange(page_elements).view(block_size, head_size)
    digits = []
    for digit in (element % 128, element // 128 % 128, element // (128 * 128)):
        cache = torch.full((num_blocks, num_kv_heads, block_size, head_size), float("nan"), dtype=dtype)
        key = digit.to(dtype)[:, None, :].expand(shape).clone()
        write_key(key, cache, torch.arange(block_size, 2 * block_size))  # the tokens of block 1
        if not torch.isnan(cache[0]).all() or torch.isnan(cache[1]).any() or not cache[1, 0].equal(cache[1, 1]):
            raise ValueError(_refusal(isa, block_size, head_size, dtype, "a page's keys do not fill exactly that page"))
        digits.append(cache[1, 0].flatten().double().round().long())
    found = digits[0] + 128 * digits[1] + 128 * 128 * digits[2]  # place -> element

    place = torch.full((page_elements,), -1)
    if found.min() < 0 or found.max() >= page_elements:
        raise ValueError(_refusal(isa, block_size, head_size, dtype, "keys are changed on their way into the cache"))
    place[found] = torch.arange(page_elements)  # element -> place
    place = place.view(block_size, head_size)

    for interleave in (*SUPPORTED_INTERLEAVES, head_size):
        for group in range(block_size, 0, -1):
            if block_size % group or group % SMALLEST_TOKEN_GROUP or head_size % interleave:
                continue
            layout = KeyLayout(block_size, head_size, group, interleave)
            if layout.offsets().equal(place):
                return layout
    raise ValueError(_refusal(isa, block_size, head_size, dtype, "no known layout fits"))


def _refusal(isa: str, block_size: int, head_size: int, dtype: torch.dtype, reason: str) -> str:
    return (
        f"page mass cannot read the K cache of CPU attention isa={isa!r} (block_size={block_size}, "
        f"head_size={head_size}, {dtype}): {reason}. Use a policy that needs no scores (streaming)."
    )
