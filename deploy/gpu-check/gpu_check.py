#!/usr/bin/env python3
"""Are the Triton kernels right on this GPU, and how fast? Needs PyTorch and Triton, not vLLM; takes under 6 minutes.

    python deploy/gpu-check/gpu_check.py [--json gpu-check.json] [--minutes 5]

Rightness: every case of tests/triton against the torch reference in float64, a large batch, CUDA graphs, two runs.
Speed: page mass of one layer beside reading K once at the copy bandwidth measured here, and beside torch's decode
attention (SDPA) on as many keys and values that lie in one piece; then both together beside the one kernel that does
both (--kv-eviction-score-kernel fused), and beside that kernel with its scores switched off. Everything is timed as a
replayed CUDA graph with a flushed L2 cache. Prints Markdown, then one line: `gpu-check: ok` or `gpu-check: FAILED`.

    python deploy/gpu-check/gpu_check.py --interpret     # on tiny shapes, under Triton's interpreter, without a GPU
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: A tensor core adds up in float32 but not to the last bit, so a little more than the tests allow.
BOUND_FACTOR = 10
BATCHES, TOKENS = (1, 4, 16, 64, 256), (1024, 4096, 16384, 32768, 131072)
#: Keys and values of a shape, at most.
MAX_CACHE_BYTES = 24 << 30
PAGE_TOKENS = 16


@dataclass(frozen=True)
class Check:
    """One comparison; `error` and `bound` in units of page mass or values, or 0 and 1 for what is or is not so."""

    name: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound


@dataclass(frozen=True)
class Timing:
    """One layer; times in microseconds, None = not measured."""

    model: str
    batch: int
    tokens: int
    queries: int
    page_mass_us: float
    with_log_sum_exp_us: float
    read_keys_us: float
    attention_us: float | None
    one_kernel_us: float | None
    one_kernel_unscored_us: float | None


def main() -> int:
    options = _parse()
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(ROOT))
    import torch
    import triton

    if not options.interpret and not torch.cuda.is_available():
        print("no GPU that torch can use; --interpret runs tiny shapes without one\ngpu-check: FAILED")
        return 1
    device = "cpu" if options.interpret else "cuda"
    deadline = time.monotonic() + 60 * options.minutes
    facts = {
        "device": "Triton's interpreter" if options.interpret else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    print(", ".join(f"{name} {value}" for name, value in facts.items()), end="\n\n")

    checks = []
    for check in _checks(device):
        checks.append(check)
        print(f"{'ok    ' if check.passed else 'FAILED'} {check.name}: {check.error:.2g} (bound {check.bound:.2g})")
    print()
    bandwidth = _copy_bandwidth(device)
    launch_us = _launch_us(device)
    print(f"Copy bandwidth (read and written): {bandwidth / 1e9:,.0f} GB/s. ", end="")
    print(f"A call from Python, without a graph: {launch_us:,.0f} µs.\n\n{_HEADER}", flush=True)
    timings = []
    for timing in _timings(device, bandwidth, deadline):
        timings.append(timing)
        print(_table_row(timing), flush=True)

    passed = all(check.passed for check in checks) and bool(timings)
    report = {
        **facts,
        "passed": passed,
        "copy_bandwidth_bytes_per_s": bandwidth,
        "launch_us": launch_us,
        "checks": [{**asdict(check), "passed": check.passed} for check in checks],
        "timings": [asdict(timing) for timing in timings],
    }
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\ngpu-check: {'ok' if passed else 'FAILED'}")
    return 0 if passed else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("gpu-check.json"), help="where the numbers go")
    parser.add_argument("--minutes", type=float, default=5, help="start no more measurements after these")
    parser.add_argument(
        "--interpret", action="store_true", help="tiny shapes under Triton's interpreter, without a GPU"
    )
    return parser.parse_args()


# ---- rightness -----------------------------------------------------------------


def _checks(device: str) -> Iterator[Check]:
    import torch

    from tests.triton.batch import CASES, make_batch

    on_gpu = device == "cuda"
    rows = ((1, 1), (33, 3), (64, 1), (97, 1), (75, 5), *([(1000, 64), (4097, 2)] if on_gpu else []))
    # The interpreter is slow, and multiplies the bits of bfloat16 as integers.
    for name, case in CASES.items() if on_gpu else [(n, CASES[n]) for n in ("SmolLM2", "head of 80", "e5m2")]:
        if on_gpu and case.get("key_dtype") == torch.float8_e4m3fn and not _has_e4m3():
            continue
        batch = make_batch(requests=rows, device=device, **case)
        yield from _compare(name, batch)
    case = CASES["Llama 3 8:1"] | {"page": 16} if on_gpu else CASES["SmolLM2"]
    batch = make_batch(requests=((97, 4),), device=device, **case)
    fewer = _page_mass(replace(batch, visible_tokens=batch.visible_tokens - 1))
    missed = (fewer.double() - batch.reference()).abs().max().item()
    yield Check("a fault of one token is seen (1 = no)", float(missed <= 10 * BOUND_FACTOR * batch.bound()), 0)
    yield from _key_difference(device)
    yield from _decode_checks(device)
    if on_gpu:
        lengths = torch.randint(1, 8192, (64,), generator=torch.Generator().manual_seed(0)).tolist()
        batch = make_batch(heads=32, kv_heads=8, head_size=128, dtype=torch.bfloat16, device=device,
                           requests=tuple((length, min(length, 3)) for length in lengths))  # fmt: skip
        yield from _compare("64 requests of up to 8192 tokens", batch)
        yield _cuda_graph(batch)


def _has_e4m3() -> bool:
    import torch

    return torch.cuda.get_device_capability() >= (8, 9)


def _page_mass(batch, **options):
    from vllm_evict.scores.triton import add_page_mass

    result = batch.start()
    add_page_mass(**batch.arguments(), page_mass=result, **options)
    return result


def _compare(name: str, batch) -> Iterator[Check]:
    import torch

    expected, bound = batch.reference(), BOUND_FACTOR * batch.bound()
    got = _page_mass(batch)
    error = (got.double() - expected).abs().nan_to_num(nan=float("inf")).max().item()
    yield Check(name, error, bound)
    given = _page_mass(batch, log_sum_exp=batch.log_sum_exp())
    error = (given.double() - expected).abs().nan_to_num(nan=float("inf")).max().item()
    yield Check(f"{name}, log-sum-exp given", error, bound)
    yield Check(f"{name}, second run differs", float(not torch.equal(_page_mass(batch), got)), 0)


def _key_difference(device: str) -> Iterator[Check]:
    import torch

    from tests.triton.batch import KEY_CASES, make_batch
    from vllm_evict.scores.reference import key_difference_reference
    from vllm_evict.scores.triton import add_key_difference

    lengths = (1, 33, 97, 130)
    for name, case in KEY_CASES.items():
        if device == "cuda" and case.get("key_dtype") == torch.float8_e4m3fn and not _has_e4m3():
            continue
        batch = make_batch(heads=case["kv_heads"], requests=tuple((n, 1) for n in lengths), device=device, **case)
        num_tokens = torch.tensor(lengths, dtype=torch.int32)
        got = torch.zeros(batch.block_table.shape, device=device)
        add_key_difference(
            key_cache=batch.key_cache,
            block_table=batch.block_table,
            num_tokens=num_tokens.to(device),
            key_difference=got,
            weight=1.0,
        )
        expected = torch.zeros(got.shape, dtype=torch.float64)
        key_difference_reference(
            key_cache=batch.keys().cpu(),
            block_table=batch.block_table.cpu(),
            num_tokens=num_tokens,
            key_difference=expected,
            compute_dtype=torch.float64,
        )
        error = (got.cpu().double() - expected).abs().nan_to_num(nan=float("inf")).max().item()
        yield Check(f"key difference, {name}", error, 1e-5 * case["kv_heads"])


def _decode(step, output, **options):
    """(output, page mass)"""
    from vllm_evict.scores.triton_decode import decode_with_page_mass

    page_mass = step.start()
    decode_with_page_mass(**step.arguments(), output=output, page_mass=page_mass, **options)
    return output, page_mass


def _decode_checks(device: str) -> Iterator[Check]:
    """Attention and page mass in one kernel."""
    import torch

    from tests.triton.batch import DECODE_CASES, make_decode_step

    on_gpu = device == "cuda"
    for name, case in DECODE_CASES.items() if on_gpu else [(n, DECODE_CASES[n]) for n in ("SmolLM2", "head of 80")]:
        lengths = (1, 33, 0, 64, 197, *([1000, 4097] if on_gpu else []))
        yield from _compare_decode(name, make_decode_step(lengths=lengths, device=device, **case))
    if on_gpu:
        lengths = torch.randint(1, 8192, (64,), generator=torch.Generator().manual_seed(0)).tolist()
        step = make_decode_step(lengths=tuple(lengths), heads=32, kv_heads=8, head_size=128, dtype=torch.bfloat16,
                                device=device)  # fmt: skip
        yield from _compare_decode("64 requests of up to 8192 tokens", step)
        yield _decode_cuda_graph(step)


def _compare_decode(name: str, step) -> Iterator[Check]:
    import torch

    output, page_mass = _decode(step, torch.empty_like(step.query))
    error = (output.double() - step.expected_output()).abs().nan_to_num(nan=float("inf")).max().item()
    yield Check(f"one kernel, {name}, attention", error, 2 * step.output_bound())
    error = (page_mass.double() - step.expected_mass()).abs().nan_to_num(nan=float("inf")).max().item()
    yield Check(f"one kernel, {name}, page mass", error, BOUND_FACTOR * step.mass_bound())
    again = _decode(step, torch.empty_like(step.query))
    differs = not (torch.equal(again[0], output) and torch.equal(again[1], page_mass))
    yield Check(f"one kernel, {name}, second run differs", float(differs), 0)


def _decode_cuda_graph(step) -> Check:
    """As `_cuda_graph`; the gate leaves attention on."""
    import torch

    enabled = torch.ones(1, dtype=torch.int32, device="cuda")
    ones = torch.ones_like(step.num_tokens)
    captured = replace(step, num_tokens=ones, visible_tokens=ones.clone())
    expected = _decode(step, torch.empty_like(step.query))
    graph, got = _captured(lambda: _decode(captured, torch.empty_like(step.query), enabled=enabled))
    captured.num_tokens.copy_(step.num_tokens)
    captured.visible_tokens.copy_(step.visible_tokens)
    graph.replay()
    wrong = not all(map(torch.equal, got, expected))
    enabled.zero_()
    graph.replay()
    wrong |= not torch.equal(got[0], expected[0]) or not torch.equal(got[1], step.start())
    return Check("one kernel, a replayed CUDA graph differs", float(wrong), 0)


def _cuda_graph(batch) -> Check:
    """A captured call follows what its tensors hold when it is replayed, and its gate."""
    import torch

    from vllm_evict.scores.triton import page_mass_scratch

    heads, kv_heads, max_pages = batch.query.shape[1], batch.key_cache.shape[2], batch.block_table.shape[1]
    scratch = torch.empty(
        page_mass_scratch(
            num_observed=len(batch.token),
            num_heads=heads,
            num_kv_heads=kv_heads,
            max_pages=max_pages,
            page_tokens=batch.page_tokens,
            has_log_sum_exp=False,
        ),
        device="cuda",
    )
    enabled = torch.ones(1, dtype=torch.int32, device="cuda")
    captured = replace(batch, visible_tokens=torch.ones_like(batch.visible_tokens))
    graph, result = _captured(lambda: _page_mass(captured, scratch=scratch, enabled=enabled))
    captured.visible_tokens.copy_(batch.visible_tokens)
    graph.replay()
    wrong = not torch.equal(result, _page_mass(batch))
    enabled.zero_()
    graph.replay()
    wrong |= not torch.equal(result, batch.start())
    return Check("a replayed CUDA graph differs", float(wrong), 0)


def _captured(function: Callable):
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


# ---- speed ---------------------------------------------------------------------

_HEADER = """\
| model (one layer) | batch | tokens | queries | page mass, µs | with log-sum-exp, µs | read K once, µs | ratio | \
attention, µs | ratio | one kernel for both, µs | of separate ones | the same without scores, µs |
|---|---|---|---|---|---|---|---|---|---|---|---|---|"""

#: (query heads, KV heads, head size, bytes of a key's element)
_MODELS = {
    "Llama 3 8B": (32, 8, 128, 2),
    "Llama 3 70B": (64, 8, 128, 2),
    "Llama 2 7B": (32, 32, 128, 2),
    "SmolLM2 135M": (9, 3, 64, 2),
    "Llama 3 8B, fp8 KV": (32, 8, 128, 1),
}


def _table_row(t: Timing) -> str:
    best = min(t.page_mass_us, t.with_log_sum_exp_us)
    attention = ("-", "-") if t.attention_us is None else (f"{t.attention_us:,.1f}", f"{best / t.attention_us:.2f}")
    one_kernel = ("-", "-", "-")
    if t.attention_us is not None and t.one_kernel_us is not None and t.one_kernel_unscored_us is not None:
        share = t.one_kernel_us / (t.attention_us + t.page_mass_us)
        one_kernel = (f"{t.one_kernel_us:,.1f}", f"{share:.2f}", f"{t.one_kernel_unscored_us:,.1f}")
    cells = [t.model, t.batch, f"{t.tokens:,}", t.queries, f"{t.page_mass_us:,.1f}", f"{t.with_log_sum_exp_us:,.1f}",
             f"{t.read_keys_us:,.1f}", f"{best / t.read_keys_us:.2f}", *attention, *one_kernel]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def _timings(device: str, bandwidth: float, deadline: float) -> Iterator[Timing]:
    if device == "cpu":
        yield _time_shape("SmolLM2 135M", 2, 64, 1, device, bandwidth)
        return
    shapes = [("Llama 3 8B", batch, tokens, 1) for tokens in TOKENS for batch in BATCHES]
    shapes += [(model, 32, 8192, 1) for model in _MODELS]
    shapes += [("Llama 3 8B", 1, 8192, 64), ("Llama 3 8B", 8, 8192, 64)]
    for model, batch, tokens, queries in shapes:
        if time.monotonic() > deadline:
            print("(time is up: the remaining shapes are left out)")
            return
        if _MODELS[model][-1] == 1 and not _has_e4m3():
            continue
        if _cache_bytes(model, batch, tokens) <= _room():
            yield _time_shape(model, batch, tokens, queries, device, bandwidth)


def _cache_bytes(model: str, batch: int, tokens: int) -> int:
    _, kv_heads, head_size, element_bytes = _MODELS[model]
    return 2 * batch * tokens * kv_heads * head_size * element_bytes


def _room() -> int:
    import torch

    torch.cuda.empty_cache()
    return min(MAX_CACHE_BYTES, torch.cuda.mem_get_info()[0] // 2)


def _time_shape(model: str, batch: int, tokens: int, queries: int, device: str, bandwidth: float) -> Timing:
    """Requests of equal length, pages in random places, as vLLM lays them out."""
    import torch

    from vllm_evict.scores.triton import add_page_mass
    from vllm_evict.scores.triton_decode import decode_with_page_mass

    heads, kv_heads, head_size, element_bytes = _MODELS[model]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    pages = tokens // PAGE_TOKENS
    cache = torch.empty(batch * pages, PAGE_TOKENS, kv_heads, 2 * head_size, dtype=dtype, device=device)
    cache.normal_()
    if element_bytes == 1:
        cache = cache.to(torch.float8_e4m3fn)
    int32 = dict(dtype=torch.int32, device=device)
    ones = torch.ones(batch * queries, **int32)
    query = torch.randn(batch * queries, heads, head_size, dtype=dtype, device=device)
    page_mass = torch.zeros(batch * queries, pages, device=device)
    arguments = dict(
        query=query,
        key_cache=cache.split(head_size, dim=-1)[0],
        block_table=torch.randperm(batch * pages, device=device).view(batch, pages).int(),
        token=torch.arange(batch * queries, **int32),
        row=torch.arange(batch, **int32).repeat_interleave(queries),
        visible_tokens=tokens * ones,
        page_mass=page_mass,
        scale=head_size**-0.5,
        weight=1.0,
    )
    lse = torch.full((batch * queries, heads), 10.0, device=device)
    page_mass_us = _time(lambda: add_page_mass(**arguments), device)
    with_lse_us = _time(lambda: add_page_mass(**arguments, log_sum_exp=lse), device)
    attention_us = one_kernel_us = unscored_us = None
    if queries == 1 and element_bytes == 2:
        # All query heads of a KV head as that many queries, so that keys are read once, as paged kernels do.
        grouped = query.view(batch, kv_heads, heads // kv_heads, head_size)
        key, value = cache.view(batch, tokens, kv_heads, 2 * head_size).transpose(1, 2).split(head_size, dim=-1)
        attention_us = _time(lambda: torch.nn.functional.scaled_dot_product_attention(grouped, key, value), device)
        decode = arguments | dict(
            value_cache=cache.split(head_size, dim=-1)[1],
            num_tokens=arguments["visible_tokens"],
            output=torch.empty_like(query),
        )
        del decode["token"]
        off = torch.zeros(1, **int32)
        one_kernel_us = _time(lambda: decode_with_page_mass(**decode), device)
        unscored_us = _time(lambda: decode_with_page_mass(**decode, enabled=off), device)
    key_bytes = _cache_bytes(model, batch, tokens) / 2
    read_keys_us = 1e6 * key_bytes / bandwidth
    return Timing(model, batch, tokens, queries, page_mass_us, with_lse_us, read_keys_us, attention_us, one_kernel_us,
                  unscored_us)  # fmt: skip


def _time(function: Callable, device: str) -> float:
    """Microseconds, median."""
    import triton.testing

    if device == "cpu":
        started = time.perf_counter()
        function()
        return 1e6 * (time.perf_counter() - started)
    graph, _ = _captured(function)
    return 1e3 * triton.testing.do_bench(graph.replay, warmup=10, rep=60, return_mode="median")


def _launch_us(device: str) -> float:
    """What a call costs the host."""
    import torch

    from tests.triton.batch import make_batch

    calls = 200 if device == "cuda" else 1
    batch = make_batch(requests=((1, 1),), device=device)
    _page_mass(batch)
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(calls):
        _page_mass(batch)
    return 1e6 * (time.perf_counter() - started) / calls


def _copy_bandwidth(device: str) -> float:
    """Bytes per second, read and written."""
    import torch

    source = torch.empty(1 << (30 if device == "cuda" else 22), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (_time(lambda: target.copy_(source), device) * 1e-6)


if __name__ == "__main__":
    try:
        status = main()
    except Exception:
        traceback.print_exc()
        print("gpu-check: FAILED")
        status = 1
    sys.exit(status)
