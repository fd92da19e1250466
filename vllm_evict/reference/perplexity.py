"""Perplexity of running text under a cache: the numbers of docs/reference.md.

    python -m vllm_evict.reference.perplexity --text novel.txt --tokens 12288 --budget 512

Text goes through the model a few tokens at a time; after each such chunk the cache shrinks to its budget.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from vllm_evict.embedded_model import embedded_model_path
from vllm_evict.reference.cache import EvictingCache
from vllm_evict.reference.h2o import H2OCache
from vllm_evict.reference.streaming import StreamingCache

SINK_TOKENS = 4


@torch.inference_mode()
def token_losses(model: PreTrainedModel, tokens: torch.Tensor, cache: Cache, chunk_tokens: int) -> torch.Tensor:
    """Cross entropy in nats of each next token: float ``[num_tokens - 1]``, for ``tokens`` long ``[num_tokens]``."""
    losses = []
    with cache.attached_to(model) if isinstance(cache, EvictingCache) else nullcontext():
        for start in range(0, len(tokens) - 1, chunk_tokens):
            stop = min(start + chunk_tokens, len(tokens) - 1)
            logits = model(tokens[None, start:stop], past_key_values=cache).logits[0]  # [chunk, vocab]
            losses.append(cross_entropy(logits.float(), tokens[start + 1 : stop + 1], reduction="none"))
    return torch.cat(losses)


def methods(budget: int) -> dict[str, Callable[[], Cache]]:
    """The caches that are compared, all of ``budget`` tokens but the first."""
    window = budget - SINK_TOKENS
    return {
        "everything": DynamicCache,
        "plain window": lambda: StreamingCache(0, budget, positions="original"),
        "streaming, original positions": lambda: StreamingCache(SINK_TOKENS, window, positions="original"),
        "streaming, positions in the cache": lambda: StreamingCache(SINK_TOKENS, window),
        "h2o": lambda: H2OCache(budget, SINK_TOKENS, budget // 2),
        "h2o, one decision": lambda: H2OCache(budget, SINK_TOKENS, budget // 2, one_decision=True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="a long text, UTF-8")
    parser.add_argument("--model", default=None, help="a Hugging Face folder (default: the embedded model)")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the text to read")
    parser.add_argument("--segment", type=int, default=4096, help="tokens each perplexity is taken over")
    parser.add_argument("--budget", type=int, default=512, help="tokens every cache but the full one may hold")
    parser.add_argument("--chunk", type=int, default=32, help="tokens per step")
    parser.add_argument("--only", default="", help="methods whose name contains this")
    options = parser.parse_args()

    torch.set_num_threads(1)
    path = options.model or embedded_model_path()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    text = options.text.read_text(encoding="utf-8")
    tokens = AutoTokenizer.from_pretrained(path)(text, return_tensors="pt").input_ids[0, : options.tokens]

    starts = range(0, len(tokens) - 1, options.segment)
    print(f"| budget {options.budget} |", *(f"{start} to {start + options.segment} |" for start in starts))
    print("|---|" + "---|" * len(starts))
    for name, make_cache in methods(options.budget).items():
        if options.only in name:
            losses = token_losses(model, tokens, make_cache(), options.chunk)
            perplexities = (segment.mean().exp() for segment in losses.split(options.segment))
            print(f"| {name} |", *(f"{perplexity:.1f} |" for perplexity in perplexities), flush=True)


if __name__ == "__main__":
    main()
