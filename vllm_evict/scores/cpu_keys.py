"""Key difference on the CPU, read straight from vLLM's packed K cache; reference.py says what it computes.

Example: two requests hold 96 and 40 tokens in pages of 32.

    difference = torch.zeros(2, 3)
    add_key_difference(key_cache=k, block_table=table, num_tokens=np.array([96, 40]),
                       key_difference=difference, weight=1 / num_kv_heads, layout=layout)
    difference[1]  # minus the mean cosine of 32 and of 8 tokens; the third stays 0

One task is one KV head of one request. It reads each page once: the sum of a page's key directions is all that the
anchor (their sum over pages) and the page's cosine to it need.
"""

import ctypes
import functools
import math

import numba
import numpy as np
import torch

from vllm_evict.scores.cpu import ELEMENTS
from vllm_evict.scores.cpu_kernel import ROW_MAJOR
from vllm_evict.scores.cpu_layout import KeyLayout
from vllm_evict.scores.cpu_threads import num_threads, run_on_all_threads
from vllm_evict.scores.cpu_vector import as_pointer, fetch_add, make_to_float, storage_dtype

__all__ = ["add_key_difference", "warm_up"]

# Sums may be reordered, or they could not run in vectors. (No other fast-math: slots may hold NaN.)
_compiled = numba.njit(error_model="numpy", fastmath={"reassoc"}, no_cpython_wrapper=True, no_cfunc_wrapper=True)

_int = ctypes.c_int64


class _Job(ctypes.Structure):
    """One call as the compiled code sees it; addresses, byte strides and counts are all int64."""

    _fields_ = (
        ("key_cache", _int),  # [num_blocks, num_kv_heads, one page in its KeyLayout]
        ("key_block_bytes", _int),
        ("key_head_bytes", _int),
        ("num_blocks", _int),
        ("num_kv_heads", _int),
        ("head_size", _int),  # the KeyLayout, as the next three
        ("block_size", _int),
        ("token_group", _int),
        ("dim_interleave", _int),
        ("block_table", _int),  # int32 [num_rows, max_pages]
        ("table_row_elements", _int),
        ("num_rows", _int),
        ("max_pages", _int),
        ("num_tokens", _int),  # int32 [num_rows]
        ("per_head", _int),  # float32 [num_kv_heads, num_rows, max_pages], the result
        # Scratch, owned by the caller.
        ("sums", _int),  # float32 [num_kv_heads, num_rows, max_pages + 1, head_size]: of pages; the last is the anchor
        ("norms", _int),  # float32 [num_kv_heads, num_rows, block_size]
        ("next_task", _int),
        ("bad_block", _int),  # set if block_table names a block that is not there
    )


_JOB = np.dtype(_Job)


def warm_up(*, dtype: torch.dtype, layout: KeyLayout) -> None:
    """Compile the kernel now (2 s of CPU time), so that the first request does not wait for it."""
    _kernel_for(dtype, layout)


def add_key_difference(
    *,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    num_tokens: np.ndarray,
    key_difference: torch.Tensor,
    weight: float,
    layout: KeyLayout,
) -> None:
    """Add the key difference of every resident page to `key_difference`, in place.

    key_difference[row, p] += weight * sum over KV heads of -mean cosine of page p's keys to the anchor

    key_cache:      [num_blocks, num_kv_heads, block_size, head_size], float32, bfloat16 or float16: the K half of
                    vLLM's cache (each page packed as in `layout`), any stride between blocks and heads
    block_table:    int32 [num_rows, max_pages]: resident pages of each row, compact, in logical order
    num_tokens:     int32 [num_rows] resident tokens of each row
    key_difference: float32 [num_rows, max_pages]; entries of pages without a token stay untouched
    weight:         factor on the difference
    layout:         how a page of `key_cache` is packed

    Reads K of resident pages once. Slots past `num_tokens` and pages of others do not influence the result, NaN or
    not. Runs on torch's OpenMP threads, in fp32.
    """
    num_tokens = np.ascontiguousarray(num_tokens, dtype=np.int32)
    _validate(key_cache, block_table, num_tokens, key_difference, layout)
    work_address, _ = _kernel_for(key_cache.dtype, layout)
    num_kv_heads, (num_rows, max_pages) = key_cache.shape[1], block_table.shape
    per_head = torch.zeros(num_kv_heads, num_rows, max_pages)
    sums = torch.empty(num_kv_heads, num_rows, max_pages + 1, layout.head_size)
    norms = torch.empty(num_kv_heads, num_rows, layout.block_size)
    job = _Job(
        key_cache=key_cache.data_ptr(),
        key_block_bytes=key_cache.stride(0) * key_cache.element_size(),
        key_head_bytes=key_cache.stride(1) * key_cache.element_size(),
        num_blocks=key_cache.shape[0],
        num_kv_heads=num_kv_heads,
        head_size=layout.head_size,
        block_size=layout.block_size,
        token_group=layout.token_group,
        dim_interleave=layout.dim_interleave,
        block_table=block_table.data_ptr(),
        table_row_elements=block_table.stride(0),
        num_rows=num_rows,
        max_pages=max_pages,
        num_tokens=num_tokens.ctypes.data,
        per_head=per_head.data_ptr(),
        sums=sums.data_ptr(),
        norms=norms.data_ptr(),
    )
    run_on_all_threads(work_address, ctypes.addressof(job), min(num_threads(), max(num_kv_heads * num_rows, 1)))
    if job.bad_block:
        raise ValueError("key difference: block_table names a block outside key_cache among the resident pages")
    key_difference += weight * per_head.sum(dim=0)


@functools.cache
def _kernel_for(dtype: torch.dtype, layout: KeyLayout):
    if dtype not in ELEMENTS:
        raise ValueError(f"key difference: dtype {dtype} is not supported, use one of {[*ELEMENTS]}")
    return _compile(ELEMENTS[dtype], ROW_MAJOR if layout.is_row_major else layout.dim_interleave)


@functools.cache
def _compile(element: str, interleave: int):
    """(address of the C function `void work(_Job *)`, what keeps it alive)."""
    c_function = numba.cfunc(numba.void(numba.types.voidptr), error_model="numpy")(_make_work(element, interleave))
    return c_function.address, c_function


def _make_work(element: str, interleave: int):
    do_task = _make_task(element, interleave)
    next_task, bad_block = _Job.next_task.offset, _Job.bad_block.offset

    def work(pointer):
        jobs = numba.carray(pointer, 1, _JOB)
        job, address = jobs[0], jobs.ctypes.data
        while True:
            task = fetch_add(address + next_task, 1)
            if task >= job.num_kv_heads * job.num_rows:
                return
            if not do_task(job, task):
                fetch_add(address + bad_block, 1)

    return work


def _make_task(element: str, interleave: int):
    to_float, storage = make_to_float(element), storage_dtype(element)

    @_compiled
    def sum_directions(job, keys, num_tokens, norms, total):
        """total[d] = sum over the first `num_tokens` tokens of a page of k[d] / |k|."""
        # interleave is a constant of the kernel, so that the loops over it dissolve.
        step = job.dim_interleave if interleave == ROW_MAJOR else interleave
        for first in range(0, num_tokens, job.token_group):
            count = min(job.token_group, num_tokens - first)
            inverse = norms[:count]
            inverse[:] = 0
            for dim in range(0, job.head_size, step):
                start = first * job.head_size + dim * job.token_group
                along = keys[start : start + count * step]
                for t in range(count):
                    for i in range(step):
                        k = to_float(along[t * step + i])
                        inverse[t] += k * k
            for t in range(count):
                inverse[t] = 1 / np.sqrt(inverse[t]) if inverse[t] > 0 else np.float32(0)
            for dim in range(0, job.head_size, step):
                start = first * job.head_size + dim * job.token_group
                along = keys[start : start + count * step]
                for i in range(step):
                    sum_along = np.float32(0)
                    for t in range(count):
                        sum_along += to_float(along[t * step + i]) * inverse[t]
                    total[dim + i] = sum_along if first == 0 else total[dim + i] + sum_along

    @_compiled
    def do_task(job, task):
        """One KV head of one row; False if its pages are not all there."""
        kv_head, row = task // job.num_rows, task % job.num_rows
        num_tokens = numba.carray(as_pointer(job.num_tokens), job.num_rows, np.int32)[row]
        table_row = as_pointer(job.block_table + row * job.table_row_elements * 4)
        blocks = numba.carray(table_row, job.max_pages, np.int32)
        sums_shape = (job.max_pages + 1, job.head_size)
        sums = numba.carray(as_pointer(job.sums + task * sums_shape[0] * sums_shape[1] * 4), sums_shape, np.float32)
        norms = numba.carray(as_pointer(job.norms + task * job.block_size * 4), job.block_size, np.float32)
        result = numba.carray(as_pointer(job.per_head + task * job.max_pages * 4), job.max_pages, np.float32)
        num_pages = (num_tokens + job.block_size - 1) // job.block_size
        for page in range(num_pages):
            if not 0 <= blocks[page] < job.num_blocks:
                return False

        anchor = sums[job.max_pages]
        anchor[:] = 0
        for page in range(num_pages):
            address = job.key_cache + blocks[page] * job.key_block_bytes + kv_head * job.key_head_bytes
            keys = numba.carray(as_pointer(address), job.block_size * job.head_size, storage)
            in_page = min(job.block_size, num_tokens - page * job.block_size)
            sum_directions(job, keys, in_page, norms, sums[page])
            for dim in range(job.head_size):
                anchor[dim] += sums[page, dim]
        squared = np.float32(0)
        for dim in range(job.head_size):
            squared += anchor[dim] * anchor[dim]
        scale = 1 / math.sqrt(squared) if squared > 0 else np.float32(0)
        for page in range(num_pages):
            along = np.float32(0)
            for dim in range(job.head_size):
                along += sums[page, dim] * anchor[dim]
            result[page] = -along * scale / min(job.block_size, num_tokens - page * job.block_size)
        return True

    return do_task


def _validate(
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    num_tokens: np.ndarray,
    key_difference: torch.Tensor,
    layout: KeyLayout,
) -> None:
    """Refuse whatever the compiled code would read wrongly; block ids it checks itself."""
    page_shape = (layout.block_size, layout.head_size)
    if key_cache.shape[2:] != page_shape or key_cache.stride()[2:] != (layout.head_size, 1):
        raise ValueError(
            f"key difference: key_cache has shape {tuple(key_cache.shape)} and strides {key_cache.stride()}, expected "
            f"[num_blocks, num_kv_heads, {layout.block_size}, {layout.head_size}], the last two dimensions contiguous"
        )
    if block_table.dtype != torch.int32 or block_table.stride(1) != 1:
        raise ValueError("key difference: block_table must be int32 with contiguous rows")
    num_rows, max_pages = block_table.shape
    if num_tokens.shape != (num_rows,):
        raise ValueError(f"key difference: num_tokens has shape {num_tokens.shape}, expected ({num_rows},)")
    if num_rows and not 0 <= num_tokens.min() <= num_tokens.max() <= max_pages * layout.block_size:
        raise ValueError("key difference: a `num_tokens` is negative or more than block_table can hold")
    if key_difference.dtype != torch.float32 or key_difference.shape != block_table.shape:
        raise ValueError(
            f"key difference: key_difference must be float32 {tuple(block_table.shape)}, "
            f"got {key_difference.dtype} {tuple(key_difference.shape)}"
        )
