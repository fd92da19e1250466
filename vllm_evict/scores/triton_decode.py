"""Attention of a decode step and its page mass in one pass over K and V: scores for a few bytes per page.

Example: two requests decode, of 96 and 40 tokens (pages of 16); the second is observed.

    int32 = dict(dtype=torch.int32, device="cuda")
    mass = torch.zeros(1, 6, device="cuda")
    decode_with_page_mass(query=q, key_cache=k, value_cache=v, block_table=table, output=output,
                          num_tokens=torch.tensor([96, 40], **int32),
                          row=torch.tensor([1], **int32), visible_tokens=torch.tensor([40], **int32),
                          page_mass=mass, scale=head_size**-0.5, weight=1.0)
    output   # [2, num_heads, head_size]: attention of both
    mass[0]  # pages 0..2 share num_heads: 16 + 16 + 8 tokens; pages 3..5 stay 0

As in triton.py nothing waits for the device or reads a tensor on the host, so a call can be captured in a CUDA graph;
sizes follow shapes alone. `enabled` switches the page mass of a captured call off, never its attention.
"""

import torch

from vllm_evict.scores import triton_decode_kernels as kernels
from vllm_evict.scores.triton import (
    BLOCK_ROWS,
    LOG2_E,
    MIN_TILE_HEADS,
    TILE_TOKENS,
    finish_page_mass,
    head_constants,
    power_of_two,
    programs_per_row,
    split_scratch,
)
from vllm_evict.scores.triton_arguments import (
    validate_gate_and_scratch,
    validate_int32,
    validate_query,
    validate_table,
)

__all__ = ["MAX_PAGE_BYTES", "decode_scratch", "decode_with_page_mass"]

#: A tile's keys, and as many its values, unless a page is larger: both pass through the registers of a program.
MAX_TILE_BYTES = 16 << 10
#: A page's keys of one head: with twice as many, registers spill (compiled for sm_80 and sm_90).
MAX_PAGE_BYTES = 32 << 10
#: Tiles of a program, at least: its output, float32, is then small beside the K and V it reads.
MIN_TILES_PER_PROGRAM = 4
#: Entries of the list of observed queries that a program looks at in one go.
LIST_BLOCK = 128


def decode_scratch(
    *,
    num_rows: int,
    num_observed: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    max_pages: int,
    page_tokens: int,
    element_bytes: int,
) -> int:
    """Elements (float32) of scratch that `decode_with_page_mass` needs.

    element_bytes: of a number in the cache
    """
    tile_pages = tile_pages_of(page_tokens, head_size, element_bytes)
    num_tiles = -(-max_pages // tile_pages)
    num_splits = programs_per_row(num_rows * num_kv_heads, num_tiles, MIN_TILES_PER_PROGRAM)
    return num_heads * (num_rows * num_splits * (head_size + 2) + num_observed * (max_pages + num_tiles + 1))


def decode_with_page_mass(
    *,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    num_tokens: torch.Tensor,
    output: torch.Tensor,
    row: torch.Tensor,
    visible_tokens: torch.Tensor,
    page_mass: torch.Tensor,
    scale: float,
    weight: float,
    softcap: float = 0.0,
    enabled: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> None:
    """Write the attention of every row's query to `output`; add that of the observed ones on each page to `page_mass`.

    query:          [num_rows, num_heads, head_size], bfloat16, float16 or float32; last stride 1. Query i is row i's
                    newest token, which sees all of the row
    key_cache:      [num_blocks, page_tokens, num_kv_heads, head_size] of the query's dtype, any strides but the last,
                    which is 1; a page's keys of one head take at most MAX_PAGE_BYTES
    value_cache:    likewise, of the same shape
    block_table:    int32 [num_rows, max_pages]: resident pages of each row, compact, in logical order
    num_tokens:     int32 [num_rows] resident tokens of each row; 0 = nobody: its output is zeros
    output:         [num_rows, num_heads, head_size] of the query's dtype, written; last stride 1
    row:            int32 [num_observed] which rows are observed, each at most once
    visible_tokens: int32 [num_observed]: num_tokens of that row, or 0 = skip it, whatever its row
    page_mass:      float32 [num_observed, >= max_pages]; entries past the row's pages stay untouched
    scale:          factor on the logits
    weight:         factor on the mass; a row gains weight * num_heads in total
    softcap:        if not 0, logits become softcap * tanh(logits / softcap)
    enabled:        int32 [1]; where it is 0, page_mass is left alone. The output is written all the same
    scratch:        float32 [decode_scratch(...)]; None = allocate

    Raises ValueError for a shape, type or stride other than these. What indices name is not checked.

    Reads K and V of a row once for all query heads of a KV head. Slots past the tokens and pages of others do not
    influence the result, NaN or not. fp32 sums; weights meet values in the query's dtype. The same bits every time;
    those of the mass whoever else is in the batch.
    """
    validate_query(query, key_cache)
    page_tokens, num_kv_heads, head_size = key_cache.shape[1:]
    num_rows, num_heads, _ = query.shape
    num_observed, max_pages = len(row), block_table.shape[1]
    _validate_cache(query, key_cache, value_cache)
    _validate_output(query, output)
    validate_table(block_table, page_mass, num_observed, "page_mass")
    validate_int32("num_tokens", num_tokens, len(block_table))
    validate_int32("row", row, num_observed)
    validate_int32("visible_tokens", visible_tokens, num_observed)
    validate_gate_and_scratch(enabled, scratch)
    if len(block_table) != num_rows:
        raise ValueError(f"block_table has {len(block_table)} rows for {num_rows} queries, expected as many")
    needed = decode_scratch(
        num_rows=num_rows,
        num_observed=num_observed,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        max_pages=max_pages,
        page_tokens=page_tokens,
        element_bytes=key_cache.element_size(),
    )
    if scratch is None:
        scratch = torch.empty(needed, dtype=torch.float32, device=query.device)
    elif len(scratch) < needed:
        raise ValueError(f"scratch holds {len(scratch)} elements, {needed} are needed")

    constants = decode_constants(
        page_tokens=page_tokens,
        heads_per_kv_head=num_heads // num_kv_heads,
        head_size=head_size,
        element_bytes=key_cache.element_size(),
        has_softcap=softcap != 0,
    )
    tile_pages = constants["TILE_PAGES"]
    num_tiles = -(-max_pages // tile_pages)
    num_splits = programs_per_row(num_rows * num_kv_heads, num_tiles, MIN_TILES_PER_PROGRAM)
    parts = num_rows * num_heads * num_splits
    split_output, rest = split_scratch(scratch, parts * head_size)
    sums, rest = split_scratch(rest, num_observed * num_heads * max_pages)
    peaks, rest = split_scratch(rest, num_observed * num_heads * num_tiles)
    split_peak, rest = split_scratch(rest, parts)
    split_total, normaliser = split_scratch(rest, parts)

    kernels.attend_tiles[(num_rows, num_kv_heads, num_splits)](
        query,
        key_cache,
        value_cache,
        block_table,
        num_tokens,
        row,
        visible_tokens,
        enabled,
        split_output,
        split_peak,
        split_total,
        sums,
        peaks,
        LOG2_E * (2 * scale / softcap if softcap else scale),
        softcap * LOG2_E,
        num_observed,
        max_pages,
        num_tiles,
        MIN_TILES_PER_PROGRAM,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_table.stride(0),
        **constants,
    )
    kernels.join_splits[(num_rows, num_heads)](
        split_output,
        split_peak,
        split_total,
        num_tokens,
        output,
        max_pages,
        num_splits,
        MIN_TILES_PER_PROGRAM,
        *output.stride()[:2],
        PAGE_TOKENS=page_tokens,
        TILE_PAGES=tile_pages,
        **head_constants(head_size),
        BLOCK=BLOCK_ROWS,
    )
    finish_page_mass(
        sums=sums.view(num_observed, num_heads, max_pages),
        peaks=peaks,
        normaliser=normaliser,
        visible_tokens=visible_tokens,
        enabled=enabled,
        page_mass=page_mass,
        weight=weight,
        page_tokens=page_tokens,
        tile_pages=tile_pages,
    )


def decode_constants(
    *, page_tokens: int, heads_per_kv_head: int, head_size: int, element_bytes: int, has_softcap: bool
) -> dict[str, int | bool]:
    """What `kernels.attend_tiles` is compiled for."""
    return {
        "PAGE_TOKENS": page_tokens,
        "TILE_PAGES": tile_pages_of(page_tokens, head_size, element_bytes),
        "HEADS_PER_KV_HEAD": heads_per_kv_head,
        "TILE_HEADS": max(MIN_TILE_HEADS, power_of_two(heads_per_kv_head)),
        **head_constants(head_size),
        "HAS_SOFTCAP": has_softcap,
        "LIST_BLOCK": LIST_BLOCK,
    }


def tile_pages_of(page_tokens: int, head_size: int, element_bytes: int) -> int:
    """Pages of a tile."""
    token_bytes = head_constants(head_size)["HEAD_SIZE_PADDED"] * element_bytes
    return max(1, min(TILE_TOKENS, MAX_TILE_BYTES // token_bytes) // page_tokens)


def _validate_cache(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    if key_cache.dtype != query.dtype or value_cache.dtype != query.dtype:
        raise ValueError(
            f"key_cache is {key_cache.dtype}, value_cache {value_cache.dtype}; both must be {query.dtype}, as the query"
        )
    if value_cache.shape != key_cache.shape or value_cache.stride(3) != 1:
        raise ValueError(
            f"value_cache has shape {tuple(value_cache.shape)} and strides {value_cache.stride()}, expected "
            f"{tuple(key_cache.shape)} with contiguous heads"
        )
    page_tokens, _, head_size = key_cache.shape[1:]
    page_bytes = page_tokens * head_size * key_cache.element_size()
    if page_bytes > MAX_PAGE_BYTES:
        raise ValueError(
            f"a page's keys of one head take {page_bytes} bytes ({page_tokens} tokens of {head_size} {key_cache.dtype})"
            f", at most {MAX_PAGE_BYTES} are supported: lower --block-size"
        )


def _validate_output(query: torch.Tensor, output: torch.Tensor) -> None:
    if output.dtype != query.dtype or output.shape != query.shape or output.stride(2) != 1:
        raise ValueError(
            f"output must be {query.dtype} {tuple(query.shape)} with contiguous heads, got {output.dtype} "
            f"{tuple(output.shape)}, strides {output.stride()}"
        )
