"""The XFORMERS backend's attention against a slow reference, interpreted: `python -m tests.triton.xformers_cases FILE`.

Writes `{case: Errors}` as JSON. A process of its own, because xFormers' kernels are interpreted only where everything
is (see `fake_gpu`).
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

from tests.triton.fake_gpu import pretend

CASES = {
    "decode": dict(requests=((1, 1), (1, 33), (1, 64), (1, 97))),
    "decode, one": dict(requests=((1, 300),)),  # its keys are split
    "decode, MHA": dict(requests=((1, 40), (1, 5)), heads=2),
    "decode, MQA": dict(requests=((1, 40), (1, 5)), heads=6, kv_heads=1),
    "prefill": dict(requests=((48, 48),)),
    "prefill, odd": dict(requests=((5, 5), (17, 17), (31, 90))),
    "prefill, MHA": dict(requests=((20, 70),), heads=2),
    "mixed": dict(requests=((1, 70), (3, 3), (1, 2), (20, 130))),
    "padded batch": dict(requests=((1, 70), (0, 0), (2, 9), (0, 0))),
    "pages of 64": dict(requests=((1, 70), (20, 130)), page=64),
    "pages of 48": dict(requests=((1, 70), (20, 130)), page=48),
    "head of 16": dict(requests=((1, 70), (20, 40)), head_size=16),
    "head of 128": dict(requests=((1, 70), (3, 40)), head_size=128),
    "head of 256": dict(requests=((1, 70), (3, 40)), head_size=256),
    "head of 512": dict(requests=((1, 40), (3, 20)), head_size=512),
    "bf16": dict(requests=((1, 70), (20, 40)), dtype="bfloat16"),
    "fp32": dict(requests=((1, 70), (20, 40)), dtype="float32"),
    "window": dict(requests=((1, 5), (1, 70), (9, 50)), window=20),
    "window of pages": dict(requests=((1, 100), (3, 64)), window=32),
}


@dataclass(frozen=True)
class Errors:
    """Worst distances from the fp32 reference.

    Args:
        output: of the backend.
        plain: of a plain attention in the case's own precision; what can be asked for.
        log_sum_exp: of the backend.
    """

    output: float
    plain: float
    log_sum_exp: float


def run(case: dict) -> Errors:
    """One step of one layer, through the metadata builder and the implementation."""
    import torch
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    from vllm_evict.engine.attention.xformers_impl import XFormersImpl, XFormersMetadataBuilder

    requests = case["requests"]  # (queries, tokens) each
    dtype = getattr(torch, case.get("dtype", "float16"))
    page, head_size, window = case.get("page", 16), case.get("head_size", 32), case.get("window")
    heads, kv_heads = case.get("heads", 4), case.get("kv_heads", 2)
    generator = torch.Generator().manual_seed(0)

    pages = [-(-tokens // page) for _, tokens in requests]
    num_blocks = sum(pages) + 3
    # [blocks, tokens, heads, 2 * head size] in memory; what nobody owns or has written is NaN
    cache = torch.full((num_blocks, page, kv_heads, 2 * head_size), torch.nan, dtype=dtype)
    free = (1 + torch.randperm(num_blocks - 1, generator=generator)).tolist()
    table = torch.zeros(len(requests), max(pages) + 2, dtype=torch.int32)
    held = []
    for row, (_, tokens) in enumerate(requests):
        content = torch.randn(tokens, kv_heads, 2 * head_size, generator=generator).to(dtype)
        held.append(content)
        for index in range(pages[row]):
            table[row, index] = free.pop()
            part = content[index * page : (index + 1) * page]
            cache[int(table[row, index]), : len(part)] = part
    lengths = torch.tensor([queries for queries, _ in requests])
    start = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(torch.int32)
    query = torch.randn(int(start[-1]), heads, head_size, generator=generator).to(dtype)

    layer = dict(block_size=page, num_kv_heads=kv_heads, head_size=head_size, dtype=dtype)
    if window:
        keep_first = [max(0, tokens - queries + 1 - window) // page for queries, tokens in requests]
        for row, first in enumerate(keep_first):  # vLLM frees what lies outside of the window
            cache[table[row, :first].long()] = torch.nan
            table[row, :first] = 0
        spec = SlidingWindowSpec(**layer, sliding_window=window)
    else:
        spec = FullAttentionSpec(**layer)
    builder = XFormersMetadataBuilder(spec, ["layer"], SimpleNamespace(), torch.device("cpu"))
    metadata = builder.build(
        0,
        CommonAttentionMetadata(
            query_start_loc=start,
            query_start_loc_cpu=start,
            seq_lens=torch.tensor([tokens for _, tokens in requests], dtype=torch.int32),
            num_reqs=len(requests),
            num_actual_tokens=len(query),
            max_query_len=int(lengths.max()),
            max_seq_len=max(tokens for _, tokens in requests),
            block_table_tensor=table,
            slot_mapping=torch.zeros(len(query), dtype=torch.int64),
        ),
    )
    scale = head_size**-0.5
    impl = XFormersImpl(heads, head_size, scale, kv_heads, None, window, "auto")
    output = torch.full_like(query, torch.nan)
    log_sum_exp = torch.full((len(query), heads), torch.nan, dtype=torch.float32)
    impl.attend(query, cache.transpose(1, 2), metadata, output, log_sum_exp)

    worst = [0.0, 0.0, 0.0]
    for row, (queries, tokens) in enumerate(requests):
        for index in range(queries):
            visible = tokens - queries + 1 + index
            seen = held[row][max(0, visible - window) if window else 0 : visible]
            token = int(start[row]) + index
            expected, expected_lse = attention(query[token].float(), seen.float(), scale)
            plain, _ = attention(query[token], seen, scale)
            for i, (got, want) in enumerate(
                ((output[token].float(), expected), (plain.float(), expected), (log_sum_exp[token], expected_lse))
            ):
                difference = (got - want).abs().max().item()
                worst[i] = max(worst[i], difference) if difference == difference else float("inf")
    return Errors(*worst)


def attention(query, seen, scale):
    """One query, `[heads, head size]`, over `[tokens, KV heads, K | V]`: output and log-sum-exp `[heads]`."""
    import torch

    key, value = seen.repeat_interleave(len(query) // seen.shape[1], dim=1).chunk(2, dim=-1)
    logits = torch.einsum("hd,thd->ht", query, key) * scale
    return torch.einsum("ht,thd->hd", logits.softmax(-1), value), logits.float().logsumexp(-1)


def main(path: str) -> None:
    """Run them all."""
    pretend()
    from triton.runtime.interpreter import InterpreterBuilder

    from tests.triton.interpreter import _dot_of_numbers

    InterpreterBuilder.create_dot = _dot_of_numbers
    Path(path).write_text(json.dumps({name: asdict(run(case)) for name, case in CASES.items()}))


if __name__ == "__main__":
    main(sys.argv[1])
