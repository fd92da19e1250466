"""Page mass and key difference on a GPU, read straight from vLLM's paged cache; reference.py says what they compute.

Example: two requests decode, the second sees 40 of its tokens (pages of 16).

    int32 = dict(dtype=torch.int32, device="cuda")
    mass = torch.zeros(2, 6, device="cuda")
    add_page_mass(query=q, key_cache=k, block_table=table, token=torch.tensor([0, 1], **int32),
                  row=torch.tensor([0, 1], **int32), visible_tokens=torch.tensor([96, 40], **int32),
                  page_mass=mass, scale=head_size**-0.5, weight=1.0)
    mass[0]  # pages 0..5 share num_heads
    mass[1]  # pages 0..2 share num_heads: 16 + 16 + 8 tokens; pages 3..5 stay 0

Nothing here waits for the device or reads a tensor on the host, so every call can be captured in a CUDA graph (give
`scratch` then, or let the graph's pool own what a call allocates; `warm_up` first). `enabled` switches a captured call
off: 0 leaves the result alone. Work follows the visible tokens, but scratch and launches follow the width of
`block_table`: keep it no wider than a row may get.

What indices name is not checked: a row, token or block that is not there is the caller's fault.
"""

import functools
import math

import torch

from vllm_evict.scores import triton_kernels as kernels
from vllm_evict.scores.triton_arguments import (
    validate_gate_and_scratch,
    validate_int32,
    validate_key_cache,
    validate_options,
    validate_queries,
    validate_table,
)

__all__ = [
    "add_key_difference",
    "add_page_mass",
    "gather_rows",
    "key_difference_scratch",
    "page_mass_scratch",
    "warm_up",
]

#: What a call allocates at most when no scratch is given; a longer list of queries or rows is done in several passes.
MAX_SCRATCH_BYTES = 256 << 20
#: Tokens of a tile, unless a page is larger: 64 keys of 128 bf16 are 16 KiB, and a multiprocessor has several programs.
TILE_TOKENS = 64
#: The same for key difference, where a tile is in registers, as float32.
KEY_TILE_TOKENS = 32
#: Lines (query heads) of a tile: at least what a tensor core takes, at most what registers hold beside the keys.
MIN_TILE_HEADS, MAX_TILE_HEADS = 16, 64
#: About how many programs fill a GPU (132 multiprocessors, several each, of unequal length), and the most tiles that
#: one of them takes, so that a single long row is shared.
FULL_GRID, MAX_TILES_PER_PROGRAM = 2048, 32
#: Pages that the small kernels which add up take at once, and with them query heads or programs.
BLOCK, NORMALISER_BLOCK, BLOCK_ROWS = 128, 1024, 16
LOG2_E = math.log2(math.e)


def page_mass_scratch(
    *, num_observed: int, num_heads: int, num_kv_heads: int, max_pages: int, page_tokens: int, has_log_sum_exp: bool
) -> int:
    """Elements (float32) of scratch with which `add_page_mass` does `num_observed` queries in one pass."""
    return num_observed * _scratch_per_query(num_heads, num_kv_heads, max_pages, page_tokens, has_log_sum_exp)


def add_page_mass(
    *,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    token: torch.Tensor,
    row: torch.Tensor,
    visible_tokens: torch.Tensor,
    page_mass: torch.Tensor,
    scale: float,
    weight: float,
    softcap: float = 0.0,
    log_sum_exp: torch.Tensor | None = None,
    k_scale: torch.Tensor | float | None = None,
    enabled: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
    queries_per_row: int | None = None,
) -> None:
    """Add the attention probability of each observed query on each page to `page_mass`, in place.

    page_mass[i, p] += weight * sum over query heads, sum over the visible tokens of page p, of softmax(logits of
    query i); a row gains weight * num_heads in total.

    query:          [num_tokens, num_heads, head_size], bfloat16, float16 or float32; last stride 1
    key_cache:      [num_blocks, page_tokens, num_kv_heads, head_size], the query's dtype or float8 (e4m3fn, e5m2);
                    any strides but the last, which is 1: `kv_cache.transpose(1, 2).split(head_size, dim=-1)[0]` of
                    vLLM's [num_blocks, num_kv_heads, page_tokens, 2 * head_size]
    block_table:    int32 [num_rows, max_pages]: resident pages of each row, compact, in logical order
    token:          int32 [num_observed], index into `query`
    row:            int32 [num_observed], index into `block_table`; queries of one row side by side share one pass
                    over its pages
    visible_tokens: int32 [num_observed], how many resident tokens of its row the query may see, itself included;
                    0 = skip it, whatever its token and row
    page_mass:      float32 [num_observed, >= max_pages]; entries past the visible pages stay untouched
    scale:          factor on the logits
    weight:         factor on the mass
    softcap:        if not 0, logits become softcap * tanh(logits / softcap)
    log_sum_exp:    float32 [num_tokens, num_heads], natural logarithm of the sum of exp(logits) over the visible
                    tokens, any strides; spares a step
    k_scale:        factor on keys: a number or float32 [1] or [num_kv_heads] on the device
    enabled:        int32 [1]; where it is 0, nothing happens
    scratch:        float32 [page_mass_scratch(...)] or fewer: then in several passes; None = allocate
    queries_per_row: how many queries of a row stand side by side, at most; affects only speed. None = guess

    Reads K of visible pages once for all query heads of a KV head and all queries that share a program. Slots past
    the visible ones and pages of others do not influence the result, NaN or not. fp32 throughout; the same bits
    every time.
    """
    validate_queries(query, key_cache, block_table, token, row, visible_tokens, page_mass)
    validate_options(query, key_cache, log_sum_exp, k_scale, enabled, scratch)
    num_observed, num_heads, head_size = len(token), query.shape[1], query.shape[2]
    page_tokens, num_kv_heads, max_pages = key_cache.shape[1], key_cache.shape[2], block_table.shape[1]
    has_lse = log_sum_exp is not None
    per_query = _scratch_per_query(num_heads, num_kv_heads, max_pages, page_tokens, has_lse)
    if num_observed == 0 or per_query == 0:
        return
    if queries_per_row is None:
        queries_per_row = 1 if num_observed <= block_table.shape[0] else num_observed
    constants = page_sums_constants(
        page_tokens=page_tokens,
        heads_per_kv_head=num_heads // num_kv_heads,
        head_size=head_size,
        queries_per_row=queries_per_row,
        has_softcap=softcap != 0,
    )
    scratch, queries_per_pass = _scratch_of(scratch, per_query, num_observed, constants["TILE_QUERIES"], query.device)
    for first in range(0, num_observed, queries_per_pass):
        chosen = slice(first, first + queries_per_pass)
        _page_mass_pass(
            query=query,
            key_cache=key_cache,
            block_table=block_table,
            token=token[chosen],
            row=row[chosen],
            visible_tokens=visible_tokens[chosen],
            page_mass=page_mass[chosen],
            scale=scale,
            weight=weight,
            softcap=softcap,
            log_sum_exp=log_sum_exp,
            k_scale=k_scale,
            enabled=enabled,
            scratch=scratch,
            constants=constants,
        )


def warm_up(
    *,
    query_dtype: torch.dtype,
    num_heads: int,
    key_cache: torch.Tensor,
    softcap: float = 0.0,
    has_log_sum_exp: bool = False,
    k_scale: torch.Tensor | float | None = None,
    enabled: torch.Tensor | None = None,
) -> None:
    """Compile what `add_page_mass` will need (seconds, once per machine), so that the first request does not wait.

    query_dtype, num_heads: of the queries to come
    key_cache, softcap, k_scale, enabled: as in `add_page_mass`; only whether they are given, their types and strides
                                          matter
    """
    device = key_cache.device
    zeros = torch.zeros(1, dtype=torch.int32, device=device)
    for queries_per_row in (1, MAX_TILE_HEADS):
        add_page_mass(
            query=torch.zeros(1, num_heads, key_cache.shape[3], dtype=query_dtype, device=device),
            key_cache=key_cache,
            block_table=zeros.view(1, 1),
            token=zeros,
            row=zeros,
            visible_tokens=zeros,
            page_mass=torch.zeros(1, 1, device=device),
            scale=1.0,
            weight=1.0,
            softcap=softcap,
            log_sum_exp=torch.zeros(1, num_heads, device=device) if has_log_sum_exp else None,
            k_scale=k_scale,
            enabled=enabled,
            queries_per_row=queries_per_row,
        )


def _page_mass_pass(
    *,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    token: torch.Tensor,
    row: torch.Tensor,
    visible_tokens: torch.Tensor,
    page_mass: torch.Tensor,
    scale: float,
    weight: float,
    softcap: float,
    log_sum_exp: torch.Tensor | None,
    k_scale: torch.Tensor | float | None,
    enabled: torch.Tensor | None,
    scratch: torch.Tensor,
    constants: dict[str, int | bool],
) -> None:
    num_observed, num_heads, max_pages = len(token), query.shape[1], block_table.shape[1]
    page_tokens, num_kv_heads = key_cache.shape[1:3]
    tile_pages, num_tiles = _tiles(max_pages, page_tokens)
    has_lse = log_sum_exp is not None
    sum_heads = num_kv_heads if has_lse else num_heads
    sums, rest = split_scratch(scratch, num_observed * sum_heads * max_pages)
    peaks, normaliser = (None, None) if has_lse else split_scratch(rest, num_observed * num_heads * num_tiles)
    factor = LOG2_E * (2 * scale / softcap if softcap else scale)
    if not isinstance(k_scale, torch.Tensor) and k_scale is not None:
        factor, k_scale = factor * k_scale, None
    programs = num_observed * num_kv_heads

    kernels.page_sums[(num_observed, num_kv_heads, programs_per_row(programs, num_tiles))](
        query,
        key_cache,
        block_table,
        token,
        row,
        visible_tokens,
        log_sum_exp,
        k_scale,
        enabled,
        sums,
        peaks,
        factor,
        softcap * LOG2_E,
        num_observed,
        max_pages,
        num_tiles,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        block_table.stride(0),
        *(log_sum_exp.stride() if has_lse else (0, 0)),
        0 if k_scale is None or k_scale.numel() == 1 else k_scale.stride(0),
        **constants,
    )
    finish_page_mass(
        sums=sums.view(num_observed, sum_heads, max_pages),
        peaks=peaks,
        normaliser=normaliser,
        visible_tokens=visible_tokens,
        enabled=enabled,
        page_mass=page_mass,
        weight=weight,
        page_tokens=page_tokens,
        tile_pages=tile_pages,
    )


def finish_page_mass(
    *,
    sums: torch.Tensor,
    peaks: torch.Tensor | None,
    normaliser: torch.Tensor | None,
    visible_tokens: torch.Tensor,
    enabled: torch.Tensor | None,
    page_mass: torch.Tensor,
    weight: float,
    page_tokens: int,
    tile_pages: int,
) -> None:
    """Add `sums` to `page_mass`, normalised per query head.

    sums:        float32 [num_observed, num_heads, max_pages] as `kernels.page_sums` writes it
    peaks:       float32 [num_observed * num_heads * num_tiles], as well; None: the sums are probabilities already
    normaliser:  float32 [>= num_observed * num_heads], written; None as `peaks`
    page_tokens: tokens of a page
    tile_pages:  pages of a tile

    The others as in `add_page_mass`.
    """
    num_observed, num_heads, max_pages = sums.shape
    num_tiles = -(-max_pages // tile_pages)
    layout = {"PAGE_TOKENS": page_tokens, "TILE_PAGES": tile_pages}
    if peaks is not None:
        kernels.normalisers[(num_observed, num_heads)](
            sums, peaks, visible_tokens, enabled, normaliser, max_pages, num_tiles, **layout, BLOCK=NORMALISER_BLOCK
        )
    kernels.add_to_page_mass[(num_observed, -(-max_pages // BLOCK))](
        sums,
        peaks,
        normaliser,
        visible_tokens,
        enabled,
        page_mass,
        weight,
        num_heads,
        max_pages,
        num_tiles,
        page_mass.stride(0),
        **layout,
        BLOCK=BLOCK,
        BLOCK_HEADS=BLOCK_ROWS,
    )


def key_difference_scratch(
    *, num_rows: int, num_kv_heads: int, max_pages: int, page_tokens: int, head_size: int
) -> int:
    """Elements (float32) of scratch with which `add_key_difference` does `num_rows` rows in one pass."""
    num_tiles = _tiles(max_pages, page_tokens, KEY_TILE_TOKENS)[1]
    return num_rows * num_kv_heads * head_size * (max_pages + -(-num_tiles // MAX_TILES_PER_PROGRAM) + 1)


def add_key_difference(
    *,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    num_tokens: torch.Tensor,
    key_difference: torch.Tensor,
    weight: float,
    enabled: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> None:
    """Add the key difference of every resident page to `key_difference`, in place.

    key_difference[row, p] += weight * sum over KV heads of -mean cosine of page p's keys to the anchor

    key_cache:      as in `add_page_mass`, any of its dtypes; a scale of all keys of a head would not matter
    block_table:    int32 [num_rows, max_pages]: resident pages of each row, compact, in logical order
    num_tokens:     int32 [num_rows] resident tokens of each row; 0 = skip
    key_difference: float32 [num_rows, >= max_pages]; entries of pages without a token stay untouched
    weight:         factor on the difference
    enabled:        int32 [1]; where it is 0, nothing happens
    scratch:        float32 [key_difference_scratch(...)] or fewer: then in several passes; None = allocate

    Reads K once and writes one float32 vector per page and KV head (of 16 bfloat16 tokens, an eighth of K).
    Garbage and fp32 as in `add_page_mass`.
    """
    validate_key_cache(key_cache)
    validate_table(block_table, key_difference, len(block_table), "key_difference")
    validate_int32("num_tokens", num_tokens, len(block_table))
    validate_gate_and_scratch(enabled, scratch)
    page_tokens, num_kv_heads, head_size = key_cache.shape[1:]
    num_rows, max_pages = block_table.shape
    per_row = key_difference_scratch(
        num_rows=1, num_kv_heads=num_kv_heads, max_pages=max_pages, page_tokens=page_tokens, head_size=head_size
    )
    if num_rows == 0 or max_pages == 0:
        return
    tile_pages, num_tiles = _tiles(max_pages, page_tokens, KEY_TILE_TOKENS)
    # Fixed, because it decides which sums are added up first.
    tiles_per_program = MAX_TILES_PER_PROGRAM
    programs = -(-num_tiles // tiles_per_program)
    scratch, rows_per_pass = _scratch_of(scratch, per_row, num_rows, 1, key_cache.device)
    head = head_constants(head_size)
    for first in range(0, num_rows, rows_per_pass):
        table, tokens = block_table[first : first + rows_per_pass], num_tokens[first : first + rows_per_pass]
        result = key_difference[first : first + rows_per_pass]
        row_heads = len(tokens) * num_kv_heads
        page_directions, rest = split_scratch(scratch, row_heads * max_pages * head_size)
        program_directions, anchors = split_scratch(rest, row_heads * programs * head_size)
        kernels.key_direction_sums[(len(tokens), num_kv_heads, programs)](
            key_cache,
            table,
            tokens,
            enabled,
            page_directions,
            program_directions,
            max_pages,
            tiles_per_program,
            *key_cache.stride()[:3],
            table.stride(0),
            PAGE_TOKENS=page_tokens,
            TILE_PAGES=tile_pages,
            **head,
        )
        kernels.key_anchors[(len(tokens), num_kv_heads)](
            program_directions, enabled, anchors, programs, **head, BLOCK=BLOCK_ROWS
        )
        kernels.add_to_key_difference[(len(tokens), -(-max_pages // BLOCK_ROWS))](
            page_directions,
            anchors,
            tokens,
            enabled,
            result,
            weight,
            num_kv_heads,
            max_pages,
            result.stride(0),
            PAGE_TOKENS=page_tokens,
            **head,
            BLOCK=BLOCK_ROWS,
        )


def gather_rows(
    table: torch.Tensor,
    slots: torch.Tensor,
    lens: torch.Tensor,
    out_table: torch.Tensor,
    out_lens: torch.Tensor,
    page_tokens: int,
) -> None:
    """Bring the rows of a batch together from a table that holds every request at a place of its own.

    table:       int32 [num_slots, max_pages] resident block ids
    slots:       int32 [num_rows] which of them are in the batch, in its order; -1 = an empty row
    lens:        int32 [num_slots] tokens in resident pages
    out_table:   int32 [>= num_rows, out_pages], written: row i holds the ceil(lens / page_tokens) pages of slots[i],
                 then zeros. Rows past num_rows stay as they are
    out_lens:    int32 [>= num_rows], written: lens of slots[i], or 0
    page_tokens: tokens of a page

    Example, pages of 16 tokens: table [[7, 9, 5], [4, 0, 0]], lens [33, 3], slots [1, -1, 0] make
        out_table [[4, 0, 0], [0, 0, 0], [7, 9, 5]]     out_lens [3, 0, 33]
    """
    validate_int32("slots", slots, len(slots))
    validate_int32("lens", lens, len(table))
    for name, pages in (("table", table), ("out_table", out_table)):
        if pages.dim() != 2 or pages.dtype != torch.int32 or pages.stride(1) != 1:
            raise ValueError(f"gather_rows: {name} must be int32 [rows, pages] with contiguous rows")
    if out_lens.dtype != torch.int32 or min(len(out_table), len(out_lens)) < len(slots):
        raise ValueError(
            f"gather_rows: out_table and out_lens hold {len(out_table)} and {len(out_lens)} rows, {len(slots)} needed"
        )
    if out_table.shape[1] < table.shape[1]:
        raise ValueError(f"gather_rows: out_table holds {out_table.shape[1]} pages, table {table.shape[1]}")
    if len(slots) == 0 or out_table.shape[1] == 0:
        return
    kernels.gather_row[(len(slots), -(-out_table.shape[1] // BLOCK))](
        table,
        slots,
        lens,
        out_table,
        out_lens,
        out_table.shape[1],
        table.stride(0),
        out_table.stride(0),
        PAGE_TOKENS=page_tokens,
        BLOCK=BLOCK,
    )


# ---- sizes ---------------------------------------------------------------------


@functools.cache
def power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _tiles(max_pages: int, page_tokens: int, tile_tokens: int = TILE_TOKENS) -> tuple[int, int]:
    """(pages of a tile, tiles of a full row)."""
    tile_pages = max(1, tile_tokens // page_tokens)
    return tile_pages, -(-max_pages // tile_pages)


def page_sums_constants(
    *, page_tokens: int, heads_per_kv_head: int, head_size: int, queries_per_row: int, has_softcap: bool
) -> dict[str, int | bool]:
    """What `kernels.page_sums` is compiled for."""
    return {
        "PAGE_TOKENS": page_tokens,
        "TILE_PAGES": _tiles(1, page_tokens)[0],
        "TILE_QUERIES": _tile_queries(heads_per_kv_head, queries_per_row),
        "HEADS_PER_KV_HEAD": heads_per_kv_head,
        "HEADS_PADDED": power_of_two(heads_per_kv_head),
        **head_constants(head_size),
        "HAS_SOFTCAP": has_softcap,
    }


def head_constants(head_size: int) -> dict[str, int]:
    return {"HEAD_SIZE": head_size, "HEAD_SIZE_PADDED": max(16, power_of_two(head_size))}


def _tile_queries(heads_per_kv_head: int, queries_per_row: int) -> int:
    """The small tile if it holds them, else the large one: each is a kernel of its own."""
    heads = power_of_two(heads_per_kv_head)
    tile_heads = MIN_TILE_HEADS if queries_per_row * heads <= MIN_TILE_HEADS else MAX_TILE_HEADS
    return max(1, tile_heads // heads)


def programs_per_row(programs: int, num_tiles: int, least_tiles: int = 1) -> int:
    """Among how many programs each of `programs` rows and heads is divided, given the tiles of the longest row."""
    return -(-num_tiles // max(least_tiles, min(programs * num_tiles // FULL_GRID, MAX_TILES_PER_PROGRAM)))


def _scratch_per_query(
    num_heads: int, num_kv_heads: int, max_pages: int, page_tokens: int, has_log_sum_exp: bool
) -> int:
    if has_log_sum_exp:
        return num_kv_heads * max_pages
    return num_heads * (max_pages + _tiles(max_pages, page_tokens)[1] + 1)


def _scratch_of(
    given: torch.Tensor | None, per_item: int, num_items: int, multiple: int, device: torch.device
) -> tuple[torch.Tensor, int]:
    """(scratch, items per pass); passes end at a multiple of `multiple` items where they can."""
    elements = MAX_SCRATCH_BYTES // 4 if given is None else len(given)
    fit = min(num_items, elements // per_item)
    if given is not None and fit == 0:
        raise ValueError(f"scratch holds {elements} elements, at least {per_item} are needed")
    items = max(1, fit)
    if multiple < items < num_items:
        items -= items % multiple
    if given is None:
        given = torch.empty(items * per_item, dtype=torch.float32, device=device)
    return given, items


def split_scratch(scratch: torch.Tensor, elements: int) -> tuple[torch.Tensor, torch.Tensor]:
    return scratch[:elements], scratch[elements:]
