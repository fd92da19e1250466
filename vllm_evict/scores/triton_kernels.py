"""The Triton kernels of triton.py. reference.py says what they compute.

Page mass reads K once, in *tiles* of TILE_TOKENS consecutive resident tokens (one page or several). Of a tile, a query
head keeps its *peak*, the largest logit, and per page the sum of exp(logit - peak). Nothing is carried from tile to
tile, so programs may divide the tiles as they like without changing a bit of the result:

    page_sums            per tile: peaks and sums                    [observed, heads, ...]
    normalisers          per query head: log of the sum of all exp   [observed, heads]
    add_to_page_mass     per page: sums * exp(peak - normaliser), added up over heads

A caller that knows the log-sum-exp, as attention kernels do, skips the second step: the sums are probabilities at once.

Logits are in units of log 2 throughout, because exp2 is what the hardware has. Every sum has a fixed order.
"""

import triton
import triton.language as tl

#: Counts that change from call to call; specialising on them would compile the kernel again.
_COUNTS = ["num_observed", "max_pages", "num_tiles", "tiles_per_program", "least_tiles", "num_programs", "num_splits"]
_COUNTS += ["table_stride", "mass_stride", "lse_token_stride", "lse_head_stride"]
#: Read or written element by element; slices of them start anywhere.
_UNALIGNED = ["block_table", "token", "row", "visible_tokens", "page_mass", "log_sum_exp"]
_UNALIGNED += ["peaks", "normaliser", "split_peak", "split_total"]


def jit(function):
    """`triton.jit`, not compiled again when an argument named above changes."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return triton.jit(
        function,
        do_not_specialize=[name for name in _COUNTS if name in names],
        do_not_specialize_on_alignment=[name for name in _UNALIGNED if name in names],
    )


@jit
def page_sums(
    query,  # [num_tokens, num_heads, head_size]
    key_cache,  # [num_blocks, page_tokens, num_kv_heads, head_size]
    block_table,  # int32 [num_rows, max_pages]
    token,  # int32 [num_observed]
    row,  # int32 [num_observed]
    visible_tokens,  # int32 [num_observed]
    log_sum_exp,  # float32 [num_tokens, num_heads], natural; or None
    k_scale,  # float32 [1] or [num_kv_heads]; or None
    enabled,  # int32 [1]; or None
    sums,  # float32 [num_observed, num_heads or (with log_sum_exp) num_kv_heads, max_pages]
    peaks,  # float32 [num_observed, num_heads, num_tiles]; not with log_sum_exp
    factor,  # on q * k: log2(e) * scale, or 2 * log2(e) * scale / softcap
    softcap,  # in units of log 2
    num_observed,
    max_pages,
    num_tiles,
    query_token_stride,
    query_head_stride,
    key_block_stride,
    key_slot_stride,
    key_head_stride,
    table_stride,
    lse_token_stride,
    lse_head_stride,
    k_scale_stride,
    PAGE_TOKENS: tl.constexpr,
    TILE_PAGES: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    HEADS_PER_KV_HEAD: tl.constexpr,
    HEADS_PADDED: tl.constexpr,  # the next power of two
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_PADDED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Some tiles of one KV head, for up to TILE_QUERIES queries of one row. Grid [observed, KV head, tiles].

    Queries of a row that stand side by side, within the same TILE_QUERIES of the list, share a program: the first's.
    """
    TILE_TOKENS: tl.constexpr = PAGE_TOKENS * TILE_PAGES
    TILE_HEADS: tl.constexpr = TILE_QUERIES * HEADS_PADDED
    if enabled is not None and tl.load(enabled) == 0:
        return
    first = tl.program_id(0)
    kv_head = tl.program_id(1)
    key_head = key_cache + kv_head.to(tl.int64) * key_head_stride
    my_row = tl.load(row + first)
    row_before = tl.load(row + first - 1, mask=first % TILE_QUERIES != 0, other=-1)
    if (row_before == my_row) | (my_row < 0):
        return

    # Who takes part: offset in the list, of each query and of each query head.
    offset = tl.arange(0, TILE_QUERIES)
    in_list = (first % TILE_QUERIES + offset < TILE_QUERIES) & (first + offset < num_observed)
    same_row = tl.load(row + first + offset, mask=in_list, other=-1) == my_row
    num_queries = tl.min(tl.where(same_row, TILE_QUERIES, offset), axis=0)
    visible = tl.load(visible_tokens + first + offset, mask=offset < num_queries, other=0)
    most_visible = tl.minimum(tl.max(visible, axis=0), max_pages * PAGE_TOKENS)
    # Dealt out one by one, so that all programs have work however wide the table is: a CUDA graph is captured for the
    # widest.
    first_tile = tl.program_id(2)
    end_tile = tl.cdiv(most_visible, TILE_TOKENS)
    if first_tile >= end_tile:
        return

    line = tl.arange(0, TILE_HEADS)
    line_offset = line // HEADS_PADDED
    head = kv_head * HEADS_PER_KV_HEAD + line % HEADS_PADDED
    is_live = (line_offset < num_queries) & (line % HEADS_PADDED < HEADS_PER_KV_HEAD)
    line_visible = tl.load(visible_tokens + first + line_offset, mask=is_live, other=0)
    is_live &= line_visible > 0
    line_token = tl.load(token + first + line_offset, mask=is_live, other=0).to(tl.int64)
    dim = tl.arange(0, HEAD_SIZE_PADDED)
    q = tl.load(
        query + (line_token * query_token_stride + head * query_head_stride)[:, None] + dim[None, :],
        mask=is_live[:, None] & (dim < HEAD_SIZE)[None, :],
        other=0.0,
    )
    if k_scale is not None:
        factor *= tl.load(k_scale + kv_head * k_scale_stride)
    if log_sum_exp is not None:
        lse = tl.load(log_sum_exp + line_token * lse_token_stride + head * lse_head_stride, mask=is_live, other=0.0)
        line_peak = lse * 1.4426950408889634  # log2(e)

    slot = tl.arange(0, TILE_TOKENS)
    page_in_tile = tl.arange(0, TILE_PAGES)
    num_pages = tl.cdiv(most_visible, PAGE_TOKENS)
    table_row = block_table + my_row.to(tl.int64) * table_stride
    for tile in range(first_tile, end_tile, tl.num_programs(2)):
        position = tile * TILE_TOKENS + slot
        is_seen = position < most_visible
        block = tl.load(table_row + position // PAGE_TOKENS, mask=is_seen, other=0)
        key_row = block.to(tl.int64) * key_block_stride + position % PAGE_TOKENS * key_slot_stride
        k = tl.load(
            key_head + key_row[None, :] + dim[:, None],
            mask=is_seen[None, :] & (dim < HEAD_SIZE)[:, None],
            other=0.0,
        )
        logits = tl.dot(q, k.to(q.dtype), input_precision="ieee") * factor
        if HAS_SOFTCAP:
            logits = softcap - 2 * softcap / (tl.exp2(logits) + 1)  # softcap * tanh
        logits = tl.where(position[None, :] < line_visible[:, None], logits, float("-inf"))
        if log_sum_exp is None:
            line_peak = tl.max(logits, axis=1)
            # A query that sees nothing of the tile: exp2(-inf - 0) = 0.
            line_peak = tl.where(line_peak == float("-inf"), 0.0, line_peak)
        weights = tl.exp2(logits - line_peak[:, None])
        page_weights = tl.sum(tl.reshape(weights, [TILE_HEADS, TILE_PAGES, PAGE_TOKENS]), axis=2)

        page = tile * TILE_PAGES + page_in_tile
        if log_sum_exp is None:
            list_head = (first + line_offset).to(tl.int64) * (tl.num_programs(1) * HEADS_PER_KV_HEAD) + head
            tl.store(
                sums + (list_head * max_pages)[:, None] + page[None, :],
                page_weights,
                mask=is_live[:, None] & (page < num_pages)[None, :],
            )
            tl.store(peaks + list_head * num_tiles + tile, line_peak, mask=is_live)
        else:
            by_query = tl.sum(tl.reshape(page_weights, [TILE_QUERIES, HEADS_PADDED, TILE_PAGES]), axis=1)
            list_head = (first + offset).to(tl.int64) * tl.num_programs(1) + kv_head
            tl.store(
                sums + (list_head * max_pages)[:, None] + page[None, :],
                by_query,
                mask=(offset < num_queries)[:, None] & (page < num_pages)[None, :],
            )


@jit
def normalisers(
    sums,  # float32 [num_observed, num_heads, max_pages]
    peaks,  # float32 [num_observed, num_heads, num_tiles]
    visible_tokens,  # int32 [num_observed]
    enabled,  # int32 [1]; or None
    normaliser,  # float32 [num_observed, num_heads], written
    max_pages,
    num_tiles,
    PAGE_TOKENS: tl.constexpr,
    TILE_PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """log2 of the sum of exp2(logit) of one query head. Grid [observed, head]."""
    if enabled is not None and tl.load(enabled) == 0:
        return
    observed = tl.program_id(0)
    visible = tl.minimum(tl.load(visible_tokens + observed), max_pages * PAGE_TOKENS)
    list_head = observed.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    num_pages = tl.cdiv(visible, PAGE_TOKENS)
    if num_pages == 0:
        return
    seen_tiles = tl.cdiv(num_pages, TILE_PAGES)
    index = tl.arange(0, BLOCK)

    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, seen_tiles, BLOCK):
        tile = start + index
        peak = tl.load(peaks + list_head * num_tiles + tile, mask=tile < seen_tiles, other=float("-inf"))
        highest = tl.maximum(highest, peak)
    top = tl.max(highest, axis=0)

    total = tl.full([BLOCK], 0.0, tl.float32)
    for start in range(0, num_pages, BLOCK):
        page = start + index
        is_seen = page < num_pages
        peak = tl.load(peaks + list_head * num_tiles + page // TILE_PAGES, mask=is_seen, other=float("-inf"))
        total += tl.load(sums + list_head * max_pages + page, mask=is_seen, other=0.0) * tl.exp2(peak - top)
    tl.store(normaliser + list_head, top + tl.log2(tl.sum(total, axis=0)))


@jit
def add_to_page_mass(
    sums,  # float32 [num_observed, num_heads, max_pages], per query head or (without normaliser) per KV head
    peaks,  # float32 [num_observed, num_heads, num_tiles]
    normaliser,  # float32 [num_observed, num_heads]; None: the sums are probabilities already
    visible_tokens,  # int32 [num_observed]
    enabled,  # int32 [1]; or None
    page_mass,  # float32 [num_observed, >= max_pages], added to
    weight,
    num_heads,
    max_pages,
    num_tiles,
    mass_stride,
    PAGE_TOKENS: tl.constexpr,
    TILE_PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """Some pages of one query. Grid [observed, pages]."""
    if enabled is not None and tl.load(enabled) == 0:
        return
    observed = tl.program_id(0).to(tl.int64)
    visible = tl.minimum(tl.load(visible_tokens + observed), max_pages * PAGE_TOKENS)
    page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_seen = page < tl.cdiv(visible, PAGE_TOKENS)
    if tl.program_id(1) * BLOCK * PAGE_TOKENS >= visible:
        return
    mass = tl.full([BLOCK], 0.0, tl.float32)
    # Several heads at once, because each load takes long and there is little to hide it behind.
    for first_head in range(0, num_heads, BLOCK_HEADS):
        head = first_head + tl.arange(0, BLOCK_HEADS)
        list_head = observed * num_heads + head
        is_read = (head < num_heads)[:, None] & is_seen[None, :]
        head_sums = tl.load(sums + (list_head * max_pages)[:, None] + page[None, :], mask=is_read, other=0.0)
        if normaliser is not None:
            tile = (page // TILE_PAGES)[None, :]
            peak = tl.load(peaks + (list_head * num_tiles)[:, None] + tile, mask=is_read, other=0.0)
            log_total = tl.load(normaliser + list_head, mask=head < num_heads, other=0.0)
            head_sums *= tl.exp2(peak - log_total[:, None])
        mass += tl.sum(head_sums, axis=0)
    place = page_mass + observed * mass_stride + page
    tl.store(place, tl.load(place, mask=is_seen, other=0.0) + weight * mass, mask=is_seen)


@jit
def key_direction_sums(
    key_cache,  # [num_blocks, page_tokens, num_kv_heads, head_size]
    block_table,  # int32 [num_rows, max_pages]
    num_tokens,  # int32 [num_rows]
    enabled,  # int32 [1]; or None
    page_directions,  # float32 [num_rows, num_kv_heads, max_pages, head_size], written
    program_directions,  # float32 [num_rows, num_kv_heads, programs, head_size], written
    max_pages,
    tiles_per_program,
    key_block_stride,
    key_slot_stride,
    key_head_stride,
    table_stride,
    PAGE_TOKENS: tl.constexpr,
    TILE_PAGES: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_PADDED: tl.constexpr,
):
    """Sums of k / |k| over each page, and over a program's pages. Grid [row, KV head, tiles]."""
    TILE_TOKENS: tl.constexpr = PAGE_TOKENS * TILE_PAGES
    if enabled is not None and tl.load(enabled) == 0:
        return
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    key_head = key_cache + kv_head.to(tl.int64) * key_head_stride
    tokens = tl.minimum(tl.load(num_tokens + row), max_pages * PAGE_TOKENS)
    num_pages = tl.cdiv(tokens, PAGE_TOKENS)
    first_tile = tl.program_id(2) * tiles_per_program
    end_tile = tl.minimum(first_tile + tiles_per_program, tl.cdiv(tokens, TILE_TOKENS))
    row_head = row * tl.num_programs(1) + kv_head
    table_row = block_table + row * table_stride
    slot = tl.arange(0, TILE_TOKENS)
    dim = tl.arange(0, HEAD_SIZE_PADDED)
    in_head = dim < HEAD_SIZE
    total = tl.full([HEAD_SIZE_PADDED], 0.0, tl.float32)
    for tile in range(first_tile, end_tile):
        position = tile * TILE_TOKENS + slot
        is_seen = position < tokens
        block = tl.load(table_row + position // PAGE_TOKENS, mask=is_seen, other=0)
        key_row = block.to(tl.int64) * key_block_stride + position % PAGE_TOKENS * key_slot_stride
        k = tl.load(
            key_head + key_row[:, None] + dim[None, :],
            mask=is_seen[:, None] & in_head[None, :],
            other=0.0,
        ).to(tl.float32)
        square = tl.sum(k * k, axis=1)
        inverse = tl.where(square > 0, 1 / tl.sqrt(tl.where(square > 0, square, 1.0)), 0.0)
        directions = tl.reshape(k * inverse[:, None], [TILE_PAGES, PAGE_TOKENS, HEAD_SIZE_PADDED])
        by_page = tl.sum(directions, axis=1)
        page = tile * TILE_PAGES + tl.arange(0, TILE_PAGES)
        tl.store(
            page_directions + (row_head * max_pages + page)[:, None] * HEAD_SIZE + dim[None, :],
            by_page,
            mask=(page < num_pages)[:, None] & in_head[None, :],
        )
        total += tl.sum(by_page, axis=0)
    program = row_head * tl.num_programs(2) + tl.program_id(2)
    tl.store(program_directions + program * HEAD_SIZE + dim, total, mask=in_head)


@jit
def key_anchors(
    program_directions,  # float32 [num_rows, num_kv_heads, programs, head_size]
    enabled,  # int32 [1]; or None
    anchors,  # float32 [num_rows, num_kv_heads, head_size], written
    num_programs,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The mean direction of all keys of one row and KV head, of length 1. Grid [row, KV head]."""
    if enabled is not None and tl.load(enabled) == 0:
        return
    row_head = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    dim = tl.arange(0, HEAD_SIZE_PADDED)
    in_head = dim < HEAD_SIZE
    total = tl.full([HEAD_SIZE_PADDED], 0.0, tl.float32)
    for first in range(0, num_programs, BLOCK):
        program = first + tl.arange(0, BLOCK)
        at = ((row_head * num_programs + program) * HEAD_SIZE)[:, None] + dim[None, :]
        is_read = (program < num_programs)[:, None] & in_head[None, :]
        total += tl.sum(tl.load(program_directions + at, mask=is_read, other=0.0), axis=0)
    square = tl.sum(total * total, axis=0)
    length = tl.where(square > 0, tl.sqrt(square), 1.0)
    tl.store(anchors + row_head * HEAD_SIZE + dim, total / length, mask=in_head)


@jit
def add_to_key_difference(
    page_directions,  # float32 [num_rows, num_kv_heads, max_pages, head_size]
    anchors,  # float32 [num_rows, num_kv_heads, head_size]
    num_tokens,  # int32 [num_rows]
    enabled,  # int32 [1]; or None
    key_difference,  # float32 [num_rows, >= max_pages], added to
    weight,
    num_kv_heads,
    max_pages,
    mass_stride,  # of key_difference
    PAGE_TOKENS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some pages of one row. Grid [row, pages]."""
    if enabled is not None and tl.load(enabled) == 0:
        return
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.minimum(tl.load(num_tokens + row), max_pages * PAGE_TOKENS)
    page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_held = page * PAGE_TOKENS < tokens
    if tl.program_id(1) * BLOCK * PAGE_TOKENS >= tokens:
        return
    dim = tl.arange(0, HEAD_SIZE_PADDED)
    in_head = dim < HEAD_SIZE
    cosines = tl.full([BLOCK], 0.0, tl.float32)
    for kv_head in range(num_kv_heads):
        row_head = row * num_kv_heads + kv_head
        anchor = tl.load(anchors + row_head * HEAD_SIZE + dim, mask=in_head, other=0.0)
        directions = tl.load(
            page_directions + (row_head * max_pages + page)[:, None] * HEAD_SIZE + dim[None, :],
            mask=is_held[:, None] & in_head[None, :],
            other=0.0,
        )
        cosines += tl.sum(directions * anchor[None, :], axis=1)
    in_page = tl.minimum(tokens - page * PAGE_TOKENS, PAGE_TOKENS)
    place = key_difference + row * mass_stride + page
    difference = -weight * cosines / in_page
    tl.store(place, tl.load(place, mask=is_held, other=0.0) + difference, mask=is_held)


@jit
def gather_row(
    table,  # int32 [num_slots, max_pages]
    slots,  # int32 [num_rows]
    lens,  # int32 [num_slots], in tokens
    out_table,  # int32 [>= num_rows, out_pages], written
    out_lens,  # int32 [>= num_rows], written
    out_pages,
    table_stride,
    out_stride,
    PAGE_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some pages of one row. Grid [row, pages]. A slot of -1 is an empty row."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    tokens = tl.load(lens + slot, mask=slot >= 0, other=0)
    page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_held = page < tl.cdiv(tokens, PAGE_TOKENS)
    block = tl.load(table + slot * table_stride + page, mask=is_held, other=0)
    tl.store(out_table + row * out_stride + page, block, mask=page < out_pages)
    if tl.program_id(1) == 0:
        tl.store(out_lens + row, tokens)
