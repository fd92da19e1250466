"""How long page mass takes, next to what it can be compared with, in the same run.

    python -m vllm_evict.bench.page_mass [--batch 16 --tokens 1024 ...]

- read K: load every key of the batch once and add up the bits, on the same threads; the floor.
- attention: vLLM's own kernel on the same batch (reads K and V).
- page mass: one call per layer.
- in a step: the same call inside a decode step (each layer's matrix products, cache write and
  attention), where page mass takes turns with torch's OpenMP threads and finds K in the cache only
  if attention left it there.

Every call is one layer. Rounds are interleaved. On a shared machine most calls are interrupted, so
besides the median the 5 % quantile is given: calls that had the cores to themselves. Threads are set
up as vLLM's CPU worker does it: a fresh process, libgomp preloaded, one thread pinned per core.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

_IN_CHILD = "VLLM_EVICT_BENCH_CHILD"


def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    if os.environ.get(_IN_CHILD) or options.threads == 0:
        _measure(options)
        return
    # As vLLM's OMPProcessManager: bound before the process starts, or it has no effect.
    cores = sorted(os.sched_getaffinity(0))[: options.threads]
    environment = {
        **os.environ,
        _IN_CHILD: "1",
        "LD_PRELOAD": _torch_libgomp(),
        "OMP_NUM_THREADS": str(len(cores)),
        "GOMP_CPU_AFFINITY": " ".join(map(str, cores)),
    }
    command = [sys.executable, "-m", "vllm_evict.bench.page_mass", *(arguments or sys.argv[1:])]
    sys.exit(subprocess.run(command, env=environment).returncode)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batch", type=int, default=16, help="requests")
    parser.add_argument("--tokens", type=int, default=1024, help="resident tokens per request")
    parser.add_argument("--queries", type=int, default=1, help="observed queries per request")
    parser.add_argument("--page", type=int, default=32, help="tokens per page")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--heads", type=int, default=9, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=576, help="width of the decode step's layers")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--isa", default="vec", help="K packing of vLLM's CPU attention")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2, help="0 = leave the process as it is")
    return parser.parse_args(arguments)


def _torch_libgomp() -> str:
    import glob

    import torch

    found = glob.glob(os.path.join(os.path.dirname(torch.__file__), "lib", "libgomp*.so*"))
    return found[0] if found else ""


class _Batch:
    """`batch` requests that decode (or observe `queries` each), with caches of their own per layer."""

    def __init__(self, options: argparse.Namespace) -> None:
        import numpy as np
        import torch
        from vllm import _custom_ops as ops

        from vllm_evict.scores.cpu import ObservedQueries, detect_key_layout

        torch.manual_seed(0)
        o, dtype = options, getattr(torch, options.dtype)
        self.options, self.ops, self.torch = o, ops, torch
        pages = -(-o.tokens // o.page)
        num_blocks = o.batch * pages
        # Pages of one request lie scattered, as after some time in service.
        self.block_table = torch.randperm(num_blocks).int().view(o.batch, pages)
        num_queries = o.batch * o.queries
        self.slots = (self.block_table[:, -1].long() * o.page).repeat_interleave(o.queries)
        self.key = torch.randn(num_queries, o.kv_heads, o.head_size).to(dtype)
        self.layers = []
        for _ in range(o.layers):
            cache = torch.empty(num_blocks, o.kv_heads, 2 * o.page, o.head_size, dtype=dtype)
            cache.view(-1)[:] = torch.randn(1 << 16).to(dtype).repeat(-(-cache.numel() // (1 << 16)))[: cache.numel()]
            self.layers.append(tuple(cache.chunk(2, dim=2)))
        width = (o.heads + 2 * o.kv_heads) * o.head_size
        self.qkv = torch.randn(num_queries, width).to(dtype)
        self.query = self.qkv[:, : o.heads * o.head_size].view(num_queries, o.heads, o.head_size)
        self.output = torch.empty(num_queries, o.heads, o.head_size, dtype=dtype)
        self.query_start = torch.arange(0, num_queries + 1, o.queries, dtype=torch.int32)
        self.seq_lens = torch.full((o.batch,), o.tokens, dtype=torch.int32)
        self.scale = o.head_size**-0.5
        self.metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=o.batch,
            num_heads=o.heads,
            num_kv_heads=o.kv_heads,
            head_dim=o.head_size,
            seq_lens=self.seq_lens,
            dtype=dtype,
            query_start_loc=self.query_start,
            causal=True,
            sliding_window_size=-1,
            isa=o.isa,
            enable_kv_split=True,
        )
        last = np.arange(num_queries) % o.queries
        self.observed = ObservedQueries(
            token=np.arange(num_queries),
            row=np.arange(num_queries) // o.queries,
            visible_tokens=o.tokens - o.queries + 1 + last,
        )
        self.page_mass = torch.zeros(num_queries, pages)
        self.layout = detect_key_layout(
            self._write_key, block_size=o.page, head_size=o.head_size, dtype=dtype, isa=o.isa
        )
        mlp = 8 * o.hidden // 3
        shapes = {"qkv": (width, o.hidden), "o": (o.hidden, o.heads * o.head_size)}
        shapes |= {"up": (2 * mlp, o.hidden), "down": (o.hidden, mlp)}
        self.weights = [
            {name: (torch.randn(shape) * 0.02).to(dtype) for name, shape in shapes.items()} for _ in range(o.layers)
        ]
        self.key_bytes = o.layers * o.batch * pages * o.page * o.kv_heads * o.head_size * dtype.itemsize

    def _write_key(self, key, key_cache, slots) -> None:
        self._cache(key, key_cache, self.torch.empty_like(key_cache), slots)

    def _cache(self, key, key_cache, value_cache, slots) -> None:
        self.ops.cpu_attn_reshape_and_cache(key, key, key_cache, value_cache, slots, self.options.isa)

    def attention(self, layer: int) -> None:
        key_cache, value_cache = self.layers[layer]
        self.ops.cpu_attention_with_kv_cache(
            query=self.query,
            key_cache=key_cache,
            value_cache=value_cache,
            output=self.output,
            query_start_loc=self.query_start,
            seq_lens=self.seq_lens,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=self.block_table,
            softcap=0.0,
            scheduler_metadata=self.metadata,
            s_aux=None,
        )

    def score(self, layer: int) -> None:
        from vllm_evict.scores.cpu import add_page_mass

        add_page_mass(
            query=self.query,
            key_cache=self.layers[layer][0],
            block_table=self.block_table,
            observed=self.observed,
            page_mass=self.page_mass,
            scale=self.scale,
            weight=1.0,
            layout=self.layout,
        )

    def decode_step(self, before: Callable[[int], None], after: Callable[[int], None]) -> None:
        """One token of every request through all layers, with hooks around attention."""
        torch, o = self.torch, self.options
        linear = torch.nn.functional.linear
        hidden = torch.ones(len(self.query), o.hidden, dtype=self.query.dtype)
        for layer, weights in enumerate(self.weights):
            linear(hidden, weights["qkv"])
            self._cache(self.key, *self.layers[layer], self.slots)
            before(layer)
            after(layer)
            hidden = hidden + linear(self.output.flatten(1), weights["o"])
            gate, up = linear(hidden, weights["up"]).chunk(2, dim=-1)
            hidden = hidden + linear(torch.nn.functional.silu(gate) * up, weights["down"])


def _make_read_keys(batch: _Batch) -> Callable[[int], None]:
    """Add up all keys of a layer as int64, page by page, with the prefetching of page mass."""
    import numba
    import numpy as np

    from vllm_evict.scores.cpu_threads import num_threads, run_on_all_threads
    from vllm_evict.scores.cpu_vector import as_pointer, fetch_add, prefetch

    table = batch.block_table.flatten()
    num_heads, num_pages = batch.options.kv_heads, len(table)
    page_words = batch.options.page * batch.options.head_size * batch.query.element_size() // 8

    @numba.cfunc(numba.void(numba.types.voidptr), error_model="numpy")
    def read(pointer):
        job = numba.carray(pointer, 6, np.int64)
        next_task, sink = job.ctypes.data, job.ctypes.data + 40
        blocks = numba.carray(as_pointer(job[1]), num_pages, np.int32)
        pages_per_task = 32
        total = np.int64(0)
        while True:
            task = fetch_add(next_task, 1)
            first = task // num_heads * pages_per_task
            if first >= num_pages:
                break
            base = job[2] + task % num_heads * job[4]
            last = min(first + pages_per_task, num_pages) - 1
            for page in range(first, last + 1):
                keys = numba.carray(as_pointer(base + blocks[page] * job[3]), page_words, np.int64)
                ahead = base + blocks[min(page + 2, last)] * job[3]
                for line in range(0, page_words, 8):
                    prefetch(ahead + 8 * line)
                    for word in range(line, line + 8):
                        total += keys[word]
        fetch_add(sink, total)

    def run(layer: int) -> None:
        keys = batch.layers[layer][0]
        block_bytes, head_bytes = (stride * keys.element_size() for stride in keys.stride()[:2])
        job = np.array([0, table.data_ptr(), keys.data_ptr(), block_bytes, head_bytes, 0])
        run_on_all_threads(read.address, job.ctypes.data, num_threads())

    return run


def _timed(what: Callable[[int], None], milliseconds: list[float]) -> Callable[[int], None]:
    def run(layer: int) -> None:
        start = time.perf_counter()
        what(layer)
        milliseconds.append(1e3 * (time.perf_counter() - start))

    return run


def _measure(options: argparse.Namespace) -> None:
    batch = _Batch(options)
    calls = {"read K": _make_read_keys(batch), "attention": batch.attention, "page mass": batch.score}
    start = time.perf_counter()
    batch.score(0)
    print(f"compile and first call: {time.perf_counter() - start:.1f} s")
    times: dict[str, list[float]] = {name: [] for name in (*calls, "attention in a step", "in a step")}
    for round_ in range(options.rounds + 1):
        if round_ == 1:  # the first round faults memory in and wakes the threads
            for values in times.values():
                values.clear()
        for name, call in calls.items():
            for layer in range(options.layers):
                _timed(call, times[name])(layer)
        batch.decode_step(
            _timed(batch.attention, times["attention in a step"]), _timed(batch.score, times["in a step"])
        )
    quantile = {}
    for name, values in times.items():
        quantile[name] = options.layers * statistics.quantiles(values, n=20)[0]
        median = options.layers * statistics.median(values)
        print(f"{name:20} {options.layers} layers: {quantile[name]:8.2f} ms (median {median:8.2f} ms)")
    print(f"K per step {batch.key_bytes / 1e6:.0f} MB, read at {batch.key_bytes / 1e6 / quantile['read K']:.1f} GB/s")
    print(
        f"ratios: page-mass/read-K={quantile['page mass'] / quantile['read K']:.2f} "
        f"page-mass/attention={quantile['page mass'] / quantile['attention']:.2f} "
        f"in-step/read-K={quantile['in a step'] / quantile['read K']:.2f} "
        f"in-step/attention={quantile['in a step'] / quantile['attention in a step']:.2f}"
    )


if __name__ == "__main__":
    main()
