"""One request of millions of tokens on a tiny model: does a token cost more, or memory grow, the longer it lasts?

The prompt is almost all of it, because prefill is quick; the end is decoded. The same number of tokens is decoded at
the end of short requests as well, before and after, so that each kind of step is compared with its like. Time is
processor time of the engine's process, which runs on one thread. What is compared is the fastest tenth of the steps of
a kind, which other programs on the machine disturb least; the mean stands beside it, and what a rebase costs.

Positions rebase all the way: the model has few of them.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from vllm_evict.bench.report import markdown_table

MODEL_TOKENS = 2048
BUDGET_TOKENS = 256
CHUNK_TOKENS = 1024
PAGE_TOKENS = 32
VOCAB_TOKENS = 512
WARM_UP_TOKENS = 4 * MODEL_TOKENS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__.splitlines()[0]
    parser.add_argument("--tokens", type=int, default=4_000_000, help="of the stream (default: %(default)s)")
    parser.add_argument("--window", type=int, default=100_000, help="tokens at each end that are compared")
    parser.add_argument("--decode", type=int, default=4_000, help="tokens that are decoded at the end")
    parser.add_argument("--policy", default="streaming")


@dataclass
class Span:
    """Steps of one kind.

    Args:
        microseconds: processor time per token, of each step.
        pages: held by the request after each.

    """

    microseconds: list[float] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)

    def add(self, tokens: int, seconds: float, pages: int) -> None:
        """One step."""
        self.microseconds.append(1e6 * seconds / tokens)
        self.pages.append(pages)

    @property
    def undisturbed(self) -> float:
        """Microseconds per token, of the fastest tenth."""
        fastest = sorted(self.microseconds)
        return statistics.mean(fastest[: max(len(fastest) // 10, 1)])

    @property
    def mean(self) -> float:
        """Microseconds per token, of all."""
        return statistics.mean(self.microseconds)


@dataclass
class Stream:
    """What was seen of one request.

    Args:
        first: prefill steps within the first window.
        last: prefill steps within the last window of the prompt.
        decode: decode steps that move no page.
        rebases: decode steps that do.
        most_pages: that it ever held.
        num_rebases: times its pages moved down.
        prompt_bytes: resident memory of the process, all ids of the prompt in place: behind the first window, and at
            the end of the prompt.
        decode_bytes: the same after the first hundred decoded tokens, and after the last hundred. In between vLLM's
            lists of ids make room to grow, once.

    """

    first: Span = field(default_factory=Span)
    last: Span = field(default_factory=Span)
    decode: Span = field(default_factory=Span)
    rebases: Span = field(default_factory=Span)
    most_pages: int = 0
    num_rebases: int = 0
    prompt_bytes: list[int] = field(default_factory=list)
    decode_bytes: list[int] = field(default_factory=list)

    @property
    def growth_bytes(self) -> int:
        """What was added while tokens came and went."""
        return sum(samples[-1] - samples[0] for samples in (self.prompt_bytes, self.decode_bytes))


def run(args: argparse.Namespace) -> int:
    if args.tokens < 2 * args.window + args.decode:
        raise SystemExit(f"--tokens {args.tokens}: give at least two windows and what is decoded")
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_WAIT_POLICY": "passive"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory() as folder:
        engine = _engine(_tiny_model(Path(folder)), args.tokens, args.policy)
        _stream(engine, WARM_UP_TOKENS, args)
        before = _stream(engine, args.window, args)
        long = _stream(engine, args.tokens, args)
        after = _stream(engine, args.window, args)
    prefill = long.last.undisturbed / long.first.undisturbed
    decode = 2 * long.decode.undisturbed / (before.decode.undisturbed + after.decode.undisturbed)
    rows = [
        [f"prefill, first {args.window:,} tokens", *_row(long.first)],
        [f"prefill, last {args.window:,} tokens", *_row(long.last)],
        [f"decode behind {args.window:,} tokens, before", *_row(before.decode)],
        [f"decode behind {args.tokens:,} tokens", *_row(long.decode)],
        [f"decode behind {args.window:,} tokens, after", *_row(after.decode)],
        [f"decode with a rebase behind {args.tokens:,} tokens", *_row(long.rebases)],
    ]
    print(markdown_table([args.policy, "µs per token", "mean", "steps", "pages held"], rows))
    print(
        f"{args.tokens:,} tokens through a model of {MODEL_TOKENS:,} positions, budget {BUDGET_TOKENS}, chunks of "
        f"{CHUNK_TOKENS}: {long.num_rebases:,} rebases, at most {long.most_pages} pages held; memory "
        f"{' to '.join(_mib(long.prompt_bytes))} MiB through the prompt, "
        f"{' to '.join(_mib(long.decode_bytes))} decoding: "
        f"{long.growth_bytes / args.tokens:+.2f} bytes per token"
    )
    memory = 1 + long.growth_bytes / long.prompt_bytes[0]
    print(f"ratios: time={max(prefill, decode):.3f} memory={memory:.3f}")
    return 0


def _row(span: Span) -> list[str]:
    if not span.pages:
        return ["", "", "0", ""]
    pages = f"{min(span.pages)} to {max(span.pages)}"
    return [f"{span.undisturbed:.1f}", f"{span.mean:.1f}", f"{len(span.pages):,}", pages]


def _mib(samples: list[int]) -> list[str]:
    return [f"{samples[0] / 2**20:.1f}", f"{samples[-1] / 2**20:.1f}"]


def _stream(engine: Any, num_tokens: int, args: argparse.Namespace) -> Stream:
    """Run one request of `num_tokens` tokens, the last of them decoded."""
    import numpy as np
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    num_decoded = min(args.decode, num_tokens // 4)
    num_prompt = num_tokens - num_decoded
    prompt = np.random.default_rng(num_tokens).integers(VOCAB_TOKENS, size=num_prompt).tolist()
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=num_decoded,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    request_id = engine.add_request(f"stream-{time.monotonic_ns()}", {"prompt_token_ids": prompt}, sampling)
    del prompt
    scheduler = engine.engine_core.engine_core.scheduler
    process, seen, computed = psutil.Process(), Stream(), 0
    evictor, offset_pages = scheduler.page_evictor, 0
    gc.collect()
    while engine.has_unfinished_requests():
        request = scheduler.requests[request_id]
        start = time.process_time()
        engine.step()
        seconds = time.process_time() - start
        if request.is_finished():
            break
        tokens, computed = request.num_computed_tokens - computed, request.num_computed_tokens
        pages = evictor.resident_pages(request_id)
        seen.most_pages = max(seen.most_pages, pages)
        rebased, offset_pages = evictor.offset_pages(request_id) != offset_pages, evictor.offset_pages(request_id)
        seen.num_rebases += rebased
        if tokens == 1:
            (seen.rebases if rebased else seen.decode).add(tokens, seconds, pages)
            if computed % 100 == 0:
                seen.decode_bytes.append(process.memory_info().rss)
        elif WARM_UP_TOKENS < computed <= args.window + WARM_UP_TOKENS:  # the first steps fill the budget
            seen.first.add(tokens, seconds, pages)
            seen.prompt_bytes = [process.memory_info().rss]
        elif num_prompt - args.window < computed < num_prompt:
            seen.last.add(tokens, seconds, pages)
            seen.prompt_bytes.append(process.memory_info().rss)
        if num_tokens == args.tokens and computed // 500_000 != (computed - tokens) // 500_000:
            print(f"  {computed:,} tokens", file=sys.stderr, flush=True)
    return seen


def _engine(model: Path, num_tokens: int, policy: str) -> Any:
    import torch
    from vllm import LLM

    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    llm = LLM(
        str(model),
        additional_config={"kv_eviction": {"policy": policy, "budget": BUDGET_TOKENS, "positions": "rebase"}},
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        distributed_executor_backend="uni",
        block_size=PAGE_TOKENS,
        kv_cache_memory_bytes=16 << 20,
        max_model_len=num_tokens + 1,
        max_num_seqs=1,  # vLLM keeps the ids of all tokens, of that many requests
        max_num_batched_tokens=CHUNK_TOKENS,
        enable_prefix_caching=False,  # which would keep a hash of every page ever seen
        use_tqdm_on_load=False,
    )
    return llm.llm_engine


def _tiny_model(folder: Path) -> Path:
    """A random Llama: one layer, one head of 64."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_TOKENS,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=MODEL_TOKENS,
        bos_token_id=None,
        eos_token_id=None,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return folder
