"""Page mass on the CPU, read straight from vLLM's packed K cache; reference.py says what it computes.

Example: two requests decode, the second observed query sees 40 of its tokens (pages of 32).

    observed = ObservedQueries(token=[0, 1], row=[0, 1], visible_tokens=[96, 40])
    mass = torch.zeros(2, 4)
    add_page_mass(query=q, key_cache=k, block_table=table, observed=observed, page_mass=mass,
                  scale=head_size**-0.5, weight=1.0, layout=layout)
    mass[0]  # pages 0..2 share num_heads, page 3 stays 0
    mass[1]  # pages 0..1 share num_heads: 32 + 8 tokens
"""

import ctypes
import functools
import math
import threading
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_evict.scores.cpu_kernel import (
    FINISH_LANES,
    PLAN_ERRORS,
    ROW_MAJOR,
    ROW_MAJOR_LANES,
    Job,
    Kernel,
    compile_kernel,
    queries_per_block,
)
from vllm_evict.scores.cpu_layout import KeyLayout, detect_key_layout
from vllm_evict.scores.cpu_threads import num_threads, run_on_all_threads
from vllm_evict.scores.cpu_vector import CACHE_LINE_BYTES, max_lanes

__all__ = ["KeyLayout", "ObservedQueries", "add_page_mass", "detect_key_layout", "warm_up"]

ELEMENTS = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
_LOG2_E = math.log2(math.e)
#: Scratch for peaks and sums; a larger batch is done in several passes over K.
MAX_SCRATCH_BYTES = 64 << 20


@dataclass(frozen=True)
class ObservedQueries:
    """Which queries of a batch are observed; the same for all layers of a step.

    token:          int32 [num_observed], index into `query`
    row:            int32 [num_observed], index into `block_table`; queries of one row side by side
                    share one pass over its pages
    visible_tokens: int32 [num_observed], how many resident tokens of its row the query may see,
                    itself included; 0 = skip it
    """

    token: np.ndarray
    row: np.ndarray
    visible_tokens: np.ndarray
    max_visible_tokens: int = field(init=False)
    token_address: int = field(init=False, repr=False)
    row_address: int = field(init=False, repr=False)
    visible_address: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, address in (
            ("token", "token_address"),
            ("row", "row_address"),
            ("visible_tokens", "visible_address"),
        ):
            values = np.ascontiguousarray(getattr(self, name), dtype=np.int32)
            if values.shape != (len(self.token),):
                raise ValueError(
                    f"ObservedQueries.{name} has shape {values.shape}, expected one dimension "
                    f"of len(token)={len(self.token)}"
                )
            object.__setattr__(self, name, values)
            object.__setattr__(self, address, values.ctypes.data)
        longest = int(self.visible_tokens.max()) if len(self.token) else 0
        object.__setattr__(self, "max_visible_tokens", longest)

    def __len__(self) -> int:
        return len(self.token)


def warm_up(*, dtype: torch.dtype, layout: KeyLayout) -> None:
    """Compile the kernel now (3 s of CPU time), so that the first request does not wait for it.

    dtype:  of query and K cache
    layout: what `detect_key_layout` found

    Nothing is kept on disk: Numba's cache would need a writable place, and its entries are not
    renewed when a function in another file changes.
    """
    _kernel_for(dtype, layout)


def add_page_mass(
    *,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    observed: ObservedQueries,
    page_mass: torch.Tensor,
    scale: float,
    weight: float,
    softcap: float = 0.0,
    layout: KeyLayout,
) -> None:
    """Add the attention probability of each observed query on each page to `page_mass`, in place.

    page_mass[i, p] += weight * sum over query heads, sum over the visible tokens of page p, of
    softmax(logits of query i); a row gains weight * num_heads in total.

    query:       [num_tokens, num_heads, head_size], float32, bfloat16 or float16; any stride
                 between tokens and between heads
    key_cache:   [num_blocks, num_kv_heads, block_size, head_size], same dtype: the K half of vLLM's
                 cache (each page packed as in `layout`), any stride between blocks and heads
    block_table: int32 [num_rows, max_pages]: resident pages of each row, compact, in logical order
    observed:    the queries, num_observed of them
    page_mass:   float32 [num_observed, max_pages]; entries past the visible pages stay untouched
    scale:       factor on the logits
    weight:      factor on the mass
    softcap:     if not 0, logits become softcap * tanh(logits / softcap)
    layout:      how a page of `key_cache` is packed

    Reads only K of visible pages, once per KV head for all queries of a row that fit one task.
    Slots past `visible_tokens` and pages of others do not influence the result, NaN or not.
    Runs on torch's OpenMP threads. fp32 throughout; see cpu_vector.py for the error of exp2.
    """
    _validate(query, key_cache, block_table, observed, page_mass, layout)
    num_observed = len(observed)
    if num_observed == 0:
        return
    kernel = _kernel_for(query.dtype, layout)
    num_heads, num_kv_heads = query.shape[1], key_cache.shape[1]
    element_bytes = query.element_size()
    heads_per_kv_head = num_heads // num_kv_heads
    groups = max(1, -(-observed.max_visible_tokens // kernel.lanes))
    job = Job(
        query=query.data_ptr(),
        query_token_bytes=query.stride(0) * element_bytes,
        query_head_bytes=query.stride(1) * element_bytes,
        num_tokens=query.shape[0],
        num_kv_heads=num_kv_heads,
        heads_per_kv_head=heads_per_kv_head,
        queries_per_block=queries_per_block(heads_per_kv_head),
        key_cache=key_cache.data_ptr(),
        key_block_bytes=key_cache.stride(0) * element_bytes,
        key_head_bytes=key_cache.stride(1) * element_bytes,
        num_blocks=key_cache.shape[0],
        head_size=layout.head_size,
        block_size=layout.block_size,
        token_group=layout.token_group,
        lanes=kernel.lanes,
        block_table=block_table.data_ptr(),
        table_row_elements=block_table.stride(0),
        num_rows=block_table.shape[0],
        max_pages=min(block_table.shape[1], page_mass.shape[1]),
        mass_row_elements=page_mass.stride(0),
        threads=num_threads(),
        groups_stride=-(-groups // FINISH_LANES) * FINISH_LANES,
        query_factor=(2 * scale / softcap if softcap else scale) * _LOG2_E,
        softcap=softcap * _LOG2_E,
        weight=weight,
    )
    queries_per_pass = max(1, MAX_SCRATCH_BYTES // (2 * 4 * num_heads * job.groups_stride))
    for first in range(0, num_observed, queries_per_pass):
        job.num_observed = min(queries_per_pass, num_observed - first)
        job.observed_token = observed.token_address + 4 * first
        job.observed_row = observed.row_address + 4 * first
        job.observed_visible = observed.visible_address + 4 * first
        job.page_mass = page_mass.data_ptr() + 4 * first * page_mass.stride(0)
        _run(kernel, job)


class _Scratch(threading.local):
    """Memory that one calling thread keeps from call to call."""

    memory = np.empty(0, np.uint8)
    address = 0

    def regions(self, *sizes_bytes: int) -> list[int]:
        """Addresses of regions of at least these sizes, each at a cache line of its own."""
        line = CACHE_LINE_BYTES
        offsets, end = [], 0
        for size in sizes_bytes:
            offsets.append(end)
            end += -(-size // line) * line
        if len(self.memory) < end + line:
            self.memory = np.empty(end + line, np.uint8)
            self.address = -(-self.memory.ctypes.data // line) * line
        return [self.address + offset for offset in offsets]


_scratch = _Scratch()


def _run(kernel: Kernel, job: Job) -> None:
    num_heads = job.num_kv_heads * job.heads_per_kv_head
    summary_bytes = 4 * job.num_observed * num_heads * job.groups_stride
    job.tile_bytes = kernel.tile_bytes(job)
    job.first_query, job.tasks_left, job.tiles, job.peaks, job.sums = _scratch.regions(
        8 * (job.num_observed + 1),
        8 * job.num_observed,
        job.threads * job.tile_bytes,
        summary_bytes,
        summary_bytes,
    )
    address = ctypes.addressof(job)
    error = kernel.plan(address)
    if error:
        raise ValueError(f"page mass: {PLAN_ERRORS[error]}")
    run_on_all_threads(kernel.work_address, address, job.threads)


@functools.cache
def _kernel_for(dtype: torch.dtype, layout: KeyLayout) -> Kernel:
    if dtype not in ELEMENTS:
        raise ValueError(f"page mass: dtype {dtype} is not supported, use one of {[*ELEMENTS]}")
    lanes = math.gcd(layout.token_group, ROW_MAJOR_LANES if layout.is_row_major else max_lanes())
    interleave = ROW_MAJOR if layout.is_row_major else layout.dim_interleave
    return compile_kernel(ELEMENTS[dtype], lanes, interleave)


def _validate(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    observed: ObservedQueries,
    page_mass: torch.Tensor,
    layout: KeyLayout,
) -> None:
    """Refuse whatever the compiled code would read wrongly; indices are checked by `plan`."""
    if key_cache.dtype != query.dtype:
        raise ValueError(f"page mass: key_cache is {key_cache.dtype}, query is {query.dtype}")
    num_heads, num_kv_heads = query.shape[1], key_cache.shape[1]
    page_shape = (layout.block_size, layout.head_size)
    if key_cache.shape[2:] != page_shape or key_cache.stride()[2:] != (layout.head_size, 1):
        raise ValueError(
            f"page mass: key_cache has shape {tuple(key_cache.shape)} and strides "
            f"{key_cache.stride()}, expected [num_blocks, num_kv_heads, {layout.block_size}, "
            f"{layout.head_size}] with the last two dimensions contiguous"
        )
    if query.shape[2] != layout.head_size or query.stride(2) != 1:
        raise ValueError(
            f"page mass: query has shape {tuple(query.shape)} and strides {query.stride()}, "
            f"expected [num_tokens, num_heads, {layout.head_size}] with contiguous heads"
        )
    if num_heads % num_kv_heads:
        raise ValueError(f"page mass: {num_heads} query heads are no multiple of {num_kv_heads} KV heads")
    if block_table.dtype != torch.int32 or block_table.stride(1) != 1:
        raise ValueError("page mass: block_table must be int32 with contiguous rows")
    if page_mass.dtype != torch.float32 or page_mass.stride(1) != 1 or page_mass.shape[0] != len(observed):
        raise ValueError(
            f"page mass: page_mass must be float32 [{len(observed)}, max_pages] with contiguous "
            f"rows, got {page_mass.dtype} {tuple(page_mass.shape)}"
        )
