"""The page-mass kernel: what every thread does, compiled by Numba.

The work is cut into tasks of (query block, KV head, stretch of tokens). A *query block* is a run of
observed queries that read the same pages, so each page is read once for all of them and for all
query heads of the KV head. Pages are read in *groups* of `lanes` tokens; a group leaves two numbers
per query head, its largest logit and the sum of exp2(logit - largest). That is all a softmax needs:
whoever finishes the last task of a query block turns them into probabilities per page. Groups do
not depend on each other, so no task waits for another and K is read once.

Logits are kept in units of log 2 (the query is scaled by log2(e)): 2^x is what machines do fast.
"""

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass

import numba
import numpy as np

from vllm_evict.scores.cpu_vector import (
    CACHE_LINE_BYTES,
    ELEMENT_BYTES,
    as_pointer,
    fetch_add,
    make_dot,
    make_load_as_float,
    make_rescale,
    make_summarize,
    max_tile_rows,
    prefetch,
)

#: The `interleave` of row-major K.
ROW_MAJOR = 0
#: Its keys are gathered one by one, so wide vectors only make more code.
ROW_MAJOR_LANES = 8

# Functions called by compiled code only: nothing to call them from Python or C is made, which
# takes a second off the compilation. (`work` is itself the C function for the same reason: every
# level of calls optimises all code below it once more.)
_compiled = numba.njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)

#: Query rows (observed queries x query heads of one KV head) that share one pass over a page. More
#: rows reuse a cached page more often but crowd it out: 32 rows x 64 dims x 4 bytes = 8 KiB.
MAX_ROWS_PER_TASK = 32
#: Tasks per thread to aim for: enough that a thread that starts late keeps nobody waiting.
TASKS_PER_THREAD = 4
#: A shorter stretch (tokens) is not worth packing the queries again.
MIN_TOKENS_PER_TASK = 128
#: How many groups ahead of the one at work keys are prefetched (measured: 2 to 4 are alike).
GROUPS_AHEAD = 2
#: Groups are finished in vectors of this many.
FINISH_LANES = 16

_int, _float = ctypes.c_int64, ctypes.c_float


class Job(ctypes.Structure):
    """One call as the compiled code sees it; addresses, byte strides and counts are all int64."""

    _fields_ = (
        ("query", _int),  # [num_tokens, num_kv_heads * heads_per_kv_head, head_size]
        ("query_token_bytes", _int),
        ("query_head_bytes", _int),
        ("num_tokens", _int),
        ("num_kv_heads", _int),
        ("heads_per_kv_head", _int),
        ("queries_per_block", _int),  # at most, see `queries_per_block`
        ("key_cache", _int),  # [num_blocks, num_kv_heads, one page in its KeyLayout]
        ("key_block_bytes", _int),
        ("key_head_bytes", _int),
        ("num_blocks", _int),
        ("head_size", _int),  # the KeyLayout, as the next two
        ("block_size", _int),
        ("token_group", _int),
        ("lanes", _int),  # tokens per group, of the kernel
        ("block_table", _int),  # int32 [num_rows, max_pages]
        ("table_row_elements", _int),
        ("num_rows", _int),
        ("max_pages", _int),
        ("observed_token", _int),  # int32 [num_observed], as the next two
        ("observed_row", _int),
        ("observed_visible", _int),
        ("num_observed", _int),
        ("page_mass", _int),  # float32 [num_observed, max_pages]
        ("mass_row_elements", _int),
        ("threads", _int),
        # Scratch, owned by the caller.
        ("first_query", _int),  # int64 [num_observed + 1]: where each query block starts
        ("tasks_left", _int),  # int64 [num_observed]: of each query block
        ("peaks", _int),  # float32 [num_observed, num_heads, groups_stride]: largest logit
        ("sums", _int),  # same shape: sum of exp2(logit - largest)
        ("groups_stride", _int),  # groups per row, a multiple of FINISH_LANES
        ("tiles", _int),  # per thread: packed queries, then one tile of logits
        ("tile_bytes", _int),
        # Written by `plan` and `work`.
        ("num_query_blocks", _int),
        ("num_stretches", _int),
        ("next_task", _int),
        ("next_thread", _int),
        ("query_factor", _float),  # log2(e) * scale; with softcap twice that over softcap
        ("softcap", _float),  # in units of log 2; 0 = none
        ("weight", _float),
    )


_JOB = np.dtype(Job)
_NEXT_TASK, _NEXT_THREAD = Job.next_task.offset, Job.next_thread.offset

BAD_TOKEN, BAD_ROW, BAD_VISIBLE, BAD_BLOCK = 1, 2, 3, 4
PLAN_ERRORS = {
    BAD_TOKEN: "a `token` is not a row of query",
    BAD_ROW: "a `row` is not a row of block_table",
    BAD_VISIBLE: "a `visible_tokens` is negative or more than block_table or page_mass can hold",
    BAD_BLOCK: "block_table names a block outside key_cache among the visible pages",
}


@dataclass(frozen=True)
class Kernel:
    """Compiled code for one element type and key layout."""

    plan: Callable[[int], int]  # (address of a Job) -> 0 or a key of PLAN_ERRORS
    work_address: int  # C function `void work(Job *)`, to be called on every thread
    lanes: int  # tokens per group
    keep_alive: object

    def tile_bytes(self, job: Job) -> int:
        """Scratch per thread: the packed queries of a task, then one tile of logits."""
        packed = job.queries_per_block * job.heads_per_kv_head * job.head_size
        floats = packed + max_tile_rows() * self.lanes
        return -(-4 * floats // CACHE_LINE_BYTES) * CACHE_LINE_BYTES


def queries_per_block(heads_per_kv_head: int) -> int:
    return max(1, MAX_ROWS_PER_TASK // heads_per_kv_head)


@functools.cache
def compile_kernel(element: str, lanes: int, interleave: int) -> Kernel:
    """Compile (once per process) the kernel that reads groups of `lanes` tokens.

    element:    "float32", "bfloat16" or "float16"
    lanes:      a power of two that divides the layout's token group
    interleave: the layout's, or ROW_MAJOR
    Head size, page size and token group are not compiled in: most models share one kernel.
    """
    work = _make_work(element, lanes, interleave)
    c_function = numba.cfunc(numba.void(numba.types.voidptr), error_model="numpy")(work)
    return Kernel(
        plan=_compile_plan(),
        work_address=c_function.address,
        lanes=lanes,
        keep_alive=c_function,
    )


# --- before the threads start ---------------------------------------------------------------------


@functools.cache
def _compile_plan():
    @numba.njit(numba.int64(numba.int64), error_model="numpy")
    def plan(job_address):
        """Check every index, cut the queries into blocks and the blocks into stretches."""
        job = numba.carray(as_pointer(job_address), 1, _JOB)[0]
        token = numba.carray(as_pointer(job.observed_token), job.num_observed, np.int32)
        row = numba.carray(as_pointer(job.observed_row), job.num_observed, np.int32)
        visible = numba.carray(as_pointer(job.observed_visible), job.num_observed, np.int32)
        first_query = numba.carray(as_pointer(job.first_query), job.num_observed + 1, np.int64)
        tasks_left = numba.carray(as_pointer(job.tasks_left), job.num_observed, np.int64)
        table_shape = (job.num_rows, job.table_row_elements)
        table = numba.carray(as_pointer(job.block_table), table_shape, np.int32)

        num_blocks = 0
        longest = 0
        checked_pages = 0  # of the row at hand
        for i in range(job.num_observed):
            if not 0 <= token[i] < job.num_tokens:
                return BAD_TOKEN
            if not 0 <= row[i] < job.num_rows:
                return BAD_ROW
            num_pages = (visible[i] + job.block_size - 1) // job.block_size
            if visible[i] < 0 or num_pages > job.max_pages:
                return BAD_VISIBLE
            longest = max(longest, visible[i])
            new_row = i == 0 or row[i] != row[i - 1]
            if new_row:
                checked_pages = 0
            for page in range(checked_pages, num_pages):
                if not 0 <= table[row[i], page] < job.num_blocks:
                    return BAD_BLOCK
            checked_pages = max(checked_pages, num_pages)
            if new_row or i - first_query[num_blocks - 1] >= job.queries_per_block:
                first_query[num_blocks] = i
                num_blocks += 1
        first_query[num_blocks] = job.num_observed

        stretches = 1
        if job.threads > 1 and num_blocks > 0:
            whole = num_blocks * job.num_kv_heads
            wanted = (TASKS_PER_THREAD * job.threads + whole - 1) // whole
            stretches = max(1, min(wanted, longest // MIN_TOKENS_PER_TASK))
        for block in range(num_blocks):
            tasks_left[block] = job.num_kv_heads * stretches
        job.num_query_blocks = num_blocks
        job.num_stretches = stretches
        job.next_task = 0
        job.next_thread = 0
        return 0

    return plan


# --- on every thread ------------------------------------------------------------------------------


@functools.cache
def _make_finish():
    rescale = make_rescale(FINISH_LANES)

    @_compiled
    def finish(job, block):
        """Turn peaks and sums of a query block into probabilities, and add them to its pages."""
        first_query = numba.carray(as_pointer(job.first_query), block + 2, np.int64)
        visible = numba.carray(as_pointer(job.observed_visible), job.num_observed, np.int32)
        num_heads = job.num_kv_heads * job.heads_per_kv_head
        for query in range(first_query[block], first_query[block + 1]):
            num_groups = (visible[query] + job.lanes - 1) // job.lanes
            summary_shape = (num_heads, job.groups_stride)
            at = query * num_heads * job.groups_stride * 4
            peaks = numba.carray(as_pointer(job.peaks + at), summary_shape, np.float32)
            sums = numba.carray(as_pointer(job.sums + at), summary_shape, np.float32)
            for head in range(num_heads):
                peak = np.float32(-np.inf)
                for g in range(num_groups):
                    peak = max(peak, peaks[head, g])
                for g in range(0, num_groups, FINISH_LANES):
                    rescale(peaks[head, g:].ctypes.data, sums[head, g:].ctypes.data, peak)
                total = np.float32(0)
                for g in range(num_groups):
                    total += sums[head, g]
                # The first head's row becomes the sum over heads.
                for g in range(num_groups):
                    sums[0, g] = sums[head, g] / total + (sums[0, g] if head > 0 else 0)
            mass_address = job.page_mass + query * job.mass_row_elements * 4
            mass = numba.carray(as_pointer(mass_address), job.max_pages, np.float32)
            for g in range(num_groups):
                mass[g * job.lanes // job.block_size] += job.weight * sums[0, g]

    return finish


def _make_work(element: str, lanes: int, interleave: int):
    do_task = _make_task(element, lanes, interleave)
    finish = _make_finish()

    def work(pointer):
        jobs = numba.carray(pointer, 1, _JOB)
        job = jobs[0]
        next_task = jobs.ctypes.data + _NEXT_TASK
        next_thread = jobs.ctypes.data + _NEXT_THREAD
        tile = job.tiles + fetch_add(next_thread, 1) * job.tile_bytes
        num_tasks = job.num_query_blocks * job.num_kv_heads * job.num_stretches
        while True:
            task = fetch_add(next_task, 1)
            if task >= num_tasks:
                return
            block = task // (job.num_kv_heads * job.num_stretches)
            do_task(job, task, tile)
            if fetch_add(job.tasks_left + 8 * block, -1) == 1:
                finish(job, block)

    return work


def _make_task(element: str, lanes: int, interleave: int):
    row_major = interleave == ROW_MAJOR
    element_bytes = ELEMENT_BYTES[element]
    max_rows = max_tile_rows()
    pack_queries = _make_pack_queries(element)
    dot = make_dot(element, max_rows, lanes, 1 if row_major else interleave, row_major)
    summarize = make_summarize(lanes)

    @_compiled
    def group_address(job, keys, blocks, group):
        """Where the keys of the group-th `lanes` tokens of a row start."""
        token = group * lanes % job.block_size
        in_group = token % job.token_group
        token_elements = job.head_size if row_major else interleave
        offset = (token - in_group) * job.head_size + in_group * token_elements
        page = blocks[group * lanes // job.block_size]
        return keys + page * job.key_block_bytes + offset * element_bytes

    @_compiled
    def prefetch_group(job, keys):
        if row_major:
            num_steps, step_bytes = lanes, job.head_size * element_bytes
        else:
            num_steps = job.head_size // interleave
            step_bytes = job.token_group * interleave * element_bytes
        for step in range(num_steps):
            prefetch(keys + step * step_bytes)

    @_compiled
    def read_group(job, first, num_rows, tile_rows, kv_head, group, keys, ahead, tile):
        """Leave the peak and sum of one group of tokens, for every row that may see one of them."""
        visible = numba.carray(as_pointer(job.observed_visible), job.num_observed, np.int32)
        heads = job.heads_per_kv_head
        step_elements = job.head_size if row_major else job.token_group * interleave
        logits = tile + num_rows * job.head_size * 4
        for start in range(0, num_rows, tile_rows):
            rows = min(tile_rows, num_rows - start)
            sees_any = False
            for r in range(start, start + rows):
                sees_any |= visible[first + r // heads] > group * lanes
            if not sees_any:
                continue
            packed = tile + start * job.head_size * 4
            dot(rows, packed, keys, job.head_size, step_elements * element_bytes, ahead, logits)
            for r in range(rows):
                query = first + (start + r) // heads
                limit = visible[query] - group * lanes
                if limit > 0:
                    head = kv_head * heads + (start + r) % heads
                    summary = query * job.num_kv_heads * heads + head
                    at = (summary * job.groups_stride + group) * 4
                    row_logits = logits + r * lanes * 4
                    summarize(row_logits, limit, job.softcap, job.peaks + at, job.sums + at)

    @_compiled
    def do_task(job, task, tile):
        """One stretch of one KV head for one query block."""
        stretch = task % job.num_stretches
        kv_head = task // job.num_stretches % job.num_kv_heads
        block = task // (job.num_stretches * job.num_kv_heads)
        first_query = numba.carray(as_pointer(job.first_query), block + 2, np.int64)
        visible = numba.carray(as_pointer(job.observed_visible), job.num_observed, np.int32)
        row = numba.carray(as_pointer(job.observed_row), job.num_observed, np.int32)
        first = first_query[block]
        num_rows = (first_query[block + 1] - first) * job.heads_per_kv_head
        # Tiles as equal as possible: 9 rows are 5 + 4 rather than 8 + 1.
        num_tiles = (num_rows + max_rows - 1) // max_rows
        tile_rows = (num_rows + num_tiles - 1) // num_tiles

        longest = 0
        for query in range(first, first_query[block + 1]):
            longest = max(longest, visible[query])
        num_groups = (longest + lanes - 1) // lanes
        begin = num_groups * stretch // job.num_stretches
        end = num_groups * (stretch + 1) // job.num_stretches
        if begin == end:
            return
        keys = job.key_cache + kv_head * job.key_head_bytes
        table_row = job.block_table + row[first] * job.table_row_elements * 4
        blocks = numba.carray(as_pointer(table_row), job.max_pages, np.int32)

        for group in range(begin, min(begin + GROUPS_AHEAD, end)):
            prefetch_group(job, group_address(job, keys, blocks, group))
        pack_queries(job, first, num_rows, kv_head, tile_rows, tile)
        for group in range(begin, end):
            now = group_address(job, keys, blocks, group)
            ahead = group_address(job, keys, blocks, min(group + GROUPS_AHEAD, end - 1))
            read_group(job, first, num_rows, tile_rows, kv_head, group, now, ahead, tile)

    return do_task


def _make_pack_queries(element: str):
    element_bytes = ELEMENT_BYTES[element]
    load_as_float = make_load_as_float(element)

    @_compiled
    def pack_queries(job, first, num_rows, kv_head, tile_rows, tile):
        """Store the query rows of one KV head as float32 tiles [head_size, rows of the tile]."""
        token = numba.carray(as_pointer(job.observed_token), job.num_observed, np.int32)
        head_size = job.head_size
        packed = numba.carray(as_pointer(tile), num_rows * head_size, np.float32)
        heads = job.heads_per_kv_head
        for r in range(num_rows):
            start = r // tile_rows * tile_rows
            rows = min(tile_rows, num_rows - start)
            source = job.query + token[first + r // heads] * job.query_token_bytes
            source += (kv_head * heads + r % heads) * job.query_head_bytes
            for dim in range(head_size):
                value = load_as_float(source + dim * element_bytes) * job.query_factor
                packed[start * head_size + dim * rows + r - start] = value

    return pack_queries
