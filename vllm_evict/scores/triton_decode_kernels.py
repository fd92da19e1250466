"""The Triton kernels of triton_decode.py: attention of one query per row, and the sums that page mass is made of.

A program takes some tiles of one KV head of one row and reads K and V of them once, for all query heads. Of a tile it
has the peak and, per page, the sum of exp(logit - peak) anyway; stored as `page_sums` stores them (triton_kernels.py
says what tiles and peaks are), they are all that is needed to finish page mass:

    attend_tiles       per program: peak, total, unnormalised output; per tile: peaks and sums of observed rows
    join_splits        per query head: the programs' outputs brought together
    normalisers, add_to_page_mass

Attention carries its peak from tile to tile; page mass does not, so how tiles are divided does not change a bit of it.
"""

import triton.language as tl

from vllm_evict.scores.triton_kernels import jit


@jit
def attend_tiles(
    query,  # [num_rows, num_heads, head_size]
    key_cache,  # [num_blocks, page_tokens, num_kv_heads, head_size]
    value_cache,  # [num_blocks, page_tokens, num_kv_heads, head_size]
    block_table,  # int32 [num_rows, max_pages]
    num_tokens,  # int32 [num_rows]
    row,  # int32 [num_observed]
    visible_tokens,  # int32 [num_observed]
    enabled,  # int32 [1]; or None
    split_output,  # float32 [num_rows, num_heads, num_splits, head_size], written; to be divided by split_total
    split_peak,  # float32 [num_rows, num_heads, num_splits], written
    split_total,  # float32 [num_rows, num_heads, num_splits], written
    sums,  # float32 [num_observed, num_heads, max_pages], written
    peaks,  # float32 [num_observed, num_heads, num_tiles], written
    factor,  # on q * k: log2(e) * scale, or 2 * log2(e) * scale / softcap
    softcap,  # in units of log 2
    num_observed,
    max_pages,
    num_tiles,
    least_tiles,  # of a program, where there are that many
    query_token_stride,
    query_head_stride,
    key_block_stride,
    key_slot_stride,
    key_head_stride,
    value_block_stride,
    value_slot_stride,
    value_head_stride,
    table_stride,
    PAGE_TOKENS: tl.constexpr,
    TILE_PAGES: tl.constexpr,
    HEADS_PER_KV_HEAD: tl.constexpr,
    TILE_HEADS: tl.constexpr,  # a power of two
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_PADDED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
):
    """Some tiles of one KV head of one row. Grid [row, KV head, split]."""
    TILE_TOKENS: tl.constexpr = PAGE_TOKENS * TILE_PAGES
    my_row = tl.program_id(0)
    kv_head = tl.program_id(1)
    tokens = tl.minimum(tl.load(num_tokens + my_row), max_pages * PAGE_TOKENS)
    row_tiles = tl.cdiv(tokens, TILE_TOKENS)
    tiles = tl.maximum(tl.cdiv(row_tiles, tl.num_programs(2)), least_tiles)
    first_tile = tl.program_id(2) * tiles
    end_tile = tl.minimum(first_tile + tiles, row_tiles)
    if first_tile >= end_tile:
        return

    # The row's place in the list of observed queries; -1: not observed.
    place = tl.full([], -1, tl.int32)
    num_listed = num_observed
    if enabled is not None:
        num_listed = tl.where(tl.load(enabled) == 0, 0, num_observed)
    for first in range(0, num_listed, LIST_BLOCK):
        index = first + tl.arange(0, LIST_BLOCK)
        in_list = index < num_listed
        is_mine = tl.load(row + index, mask=in_list, other=-1) == my_row
        is_mine &= tl.load(visible_tokens + index, mask=in_list, other=0) > 0
        place = tl.maximum(place, tl.max(tl.where(is_mine, index, -1), axis=0))

    line = tl.arange(0, TILE_HEADS)
    is_live = line < HEADS_PER_KV_HEAD
    head = kv_head * HEADS_PER_KV_HEAD + line
    num_heads = tl.num_programs(1) * HEADS_PER_KV_HEAD
    dim = tl.arange(0, HEAD_SIZE_PADDED)
    in_head = dim < HEAD_SIZE
    q = tl.load(
        query + my_row.to(tl.int64) * query_token_stride + (head * query_head_stride)[:, None] + dim[None, :],
        mask=is_live[:, None] & in_head[None, :],
        other=0.0,
    )
    key_head = key_cache + kv_head.to(tl.int64) * key_head_stride
    value_head = value_cache + kv_head.to(tl.int64) * value_head_stride
    table_row = block_table + my_row.to(tl.int64) * table_stride
    list_head = place.to(tl.int64) * num_heads + head
    num_pages = tl.cdiv(tokens, PAGE_TOKENS)
    slot = tl.arange(0, TILE_TOKENS)
    page_in_tile = tl.arange(0, TILE_PAGES)

    peak = tl.full([TILE_HEADS], float("-inf"), tl.float32)
    total = tl.full([TILE_HEADS], 0.0, tl.float32)
    output = tl.full([TILE_HEADS, HEAD_SIZE_PADDED], 0.0, tl.float32)
    for tile in range(first_tile, end_tile):
        position = tile * TILE_TOKENS + slot
        is_seen = position < tokens
        block = tl.load(table_row + position // PAGE_TOKENS, mask=is_seen, other=0).to(tl.int64)
        key_row = block * key_block_stride + position % PAGE_TOKENS * key_slot_stride
        k = tl.load(key_head + key_row[None, :] + dim[:, None], mask=is_seen[None, :] & in_head[:, None], other=0.0)
        value_row = block * value_block_stride + position % PAGE_TOKENS * value_slot_stride
        v = tl.load(value_head + value_row[:, None] + dim[None, :], mask=is_seen[:, None] & in_head[None, :], other=0.0)
        logits = tl.dot(q, k, input_precision="ieee") * factor
        if HAS_SOFTCAP:
            logits = softcap - 2 * softcap / (tl.exp2(logits) + 1)  # softcap * tanh
        logits = tl.where(is_seen[None, :], logits, float("-inf"))
        tile_peak = tl.max(logits, axis=1)
        weights = tl.exp2(logits - tile_peak[:, None])
        page_weights = tl.sum(tl.reshape(weights, [TILE_HEADS, TILE_PAGES, PAGE_TOKENS]), axis=2)
        if place >= 0:
            page = tile * TILE_PAGES + page_in_tile
            tl.store(
                sums + (list_head * max_pages)[:, None] + page[None, :],
                page_weights,
                mask=is_live[:, None] & (page < num_pages)[None, :],
            )
            tl.store(peaks + list_head * num_tiles + tile, tile_peak, mask=is_live)

        new_peak = tl.maximum(peak, tile_peak)
        kept = tl.exp2(peak - new_peak)
        gained = tl.exp2(tile_peak - new_peak)
        total = total * kept + gained * tl.sum(page_weights, axis=1)
        attended = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        output = output * kept[:, None] + gained[:, None] * attended
        peak = new_peak

    part = (my_row.to(tl.int64) * num_heads + head) * tl.num_programs(2) + tl.program_id(2)
    tl.store(
        split_output + (part * HEAD_SIZE)[:, None] + dim[None, :], output, mask=is_live[:, None] & in_head[None, :]
    )
    tl.store(split_peak + part, peak, mask=is_live)
    tl.store(split_total + part, total, mask=is_live)


@jit
def join_splits(
    split_output,  # float32 [num_rows, num_heads, num_splits, head_size]
    split_peak,  # float32 [num_rows, num_heads, num_splits]
    split_total,  # float32 [num_rows, num_heads, num_splits]
    num_tokens,  # int32 [num_rows]
    output,  # [num_rows, num_heads, head_size], written
    max_pages,
    num_splits,
    least_tiles,  # as in `attend_tiles`
    output_token_stride,
    output_head_stride,
    PAGE_TOKENS: tl.constexpr,
    TILE_PAGES: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The output of one query head; zeros for a row without tokens. Grid [row, head]."""
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.minimum(tl.load(num_tokens + row), max_pages * PAGE_TOKENS)
    row_tiles = tl.cdiv(tokens, PAGE_TOKENS * TILE_PAGES)
    seen_splits = tl.cdiv(row_tiles, tl.maximum(tl.cdiv(row_tiles, num_splits), least_tiles))
    first_part = (row * tl.num_programs(1) + tl.program_id(1)) * num_splits
    index = tl.arange(0, BLOCK)
    dim = tl.arange(0, HEAD_SIZE_PADDED)
    in_head = dim < HEAD_SIZE

    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, seen_splits, BLOCK):
        split = first + index
        highest = tl.maximum(
            highest, tl.load(split_peak + first_part + split, mask=split < seen_splits, other=float("-inf"))
        )
    top = tl.max(highest, axis=0)

    total = tl.full([BLOCK], 0.0, tl.float32)
    joined = tl.full([HEAD_SIZE_PADDED], 0.0, tl.float32)
    for first in range(0, seen_splits, BLOCK):
        split = first + index
        is_read = split < seen_splits
        peak = tl.load(split_peak + first_part + split, mask=is_read, other=float("-inf"))
        share = tl.exp2(peak - top)
        total += share * tl.load(split_total + first_part + split, mask=is_read, other=0.0)
        part = tl.load(
            split_output + ((first_part + split) * HEAD_SIZE)[:, None] + dim[None, :],
            mask=is_read[:, None] & in_head[None, :],
            other=0.0,
        )
        joined += tl.sum(share[:, None] * part, axis=0)
    all_total = tl.sum(total, axis=0)
    joined /= tl.where(all_total > 0, all_total, 1.0)
    place = output + row * output_token_stride + tl.program_id(1) * output_head_stride + dim
    tl.store(place, joined.to(output.dtype.element_ty), mask=in_head)
