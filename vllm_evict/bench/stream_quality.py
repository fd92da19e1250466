"""Does a stream stay good past the length its model was made for? Perplexity of real text, stretch by stretch.

The text goes through the engine as one prompt, and the engine says how likely it found each token. Beside rebased
positions: positions as they are in the text, and no sinks. What could be had at best under the same budget is *fresh
context*: each stretch as a request of its own, with one budget's worth of text before it.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

from vllm_evict.bench.model_facts import embedded_model, kv_bytes_per_token
from vllm_evict.bench.report import machine_facts, markdown_table
from vllm_evict.bench.text import chosen_text

PAGE_TOKENS = 32
CHUNK_TOKENS = 512
FRESH = "fresh context"
REBASED = "streaming, rebase"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__.splitlines()[0]
    parser.add_argument("--model", help="folder of the model (default: the embedded one)")
    parser.add_argument("--text", help="file with a long text (default: six novels of Debian's r-cran-janeaustenr)")
    parser.add_argument("--tokens", type=int, default=100_000, help="of the stream (default: %(default)s)")
    parser.add_argument("--stretch", type=int, default=4096, help="tokens of a stretch")
    parser.add_argument("--budget", type=int, default=1024, help="tokens held")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--output", type=Path, default=Path("bench-stream-quality"), help="folder for JSON and PNG")


def methods(budget: int) -> dict[str, dict[str, Any]]:
    """Name: eviction settings."""
    streaming = {"policy": "streaming", "budget": budget}
    return {
        FRESH: streaming,
        REBASED: streaming | {"positions": "rebase"},
        "streaming, absolute": streaming,
        "no sinks, rebase": streaming | {"positions": "rebase", "sink": 0},
    }


def run(args: argparse.Namespace) -> int:
    model = args.model or str(embedded_model())
    args.output.mkdir(parents=True, exist_ok=True)
    what_it_is, text = chosen_text(args.text)
    settings = {
        "model": Path(model).name,
        "tokens": args.tokens,
        "stretch": args.stretch,
        "budget": args.budget,
        "dtype": args.dtype,
        "chunk": CHUNK_TOKENS,
        "text": what_it_is,
    }
    perplexities: dict[str, list[float]] = {}
    for name, eviction in methods(args.budget).items():
        path = args.output / f"{name.replace(', ', '-').replace(' ', '-')}.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        if known.get("settings") != settings:
            start = time.monotonic()
            losses = _measured(model, text, name, eviction, settings)
            known = {"settings": settings, "seconds": time.monotonic() - start, "perplexity": losses}
            path.write_text(json.dumps(known) + "\n")
            print(f"  {name}: {known['seconds']:.0f} s", file=sys.stderr, flush=True)
        perplexities[name] = known["perplexity"]
    starts = [number * args.stretch for number in range(len(perplexities[FRESH]))]
    rows = [
        [f"{start:,}", *(f"{perplexities[name][number]:.1f}" for name in perplexities)]
        for number, start in enumerate(starts)
    ]
    print(f"{settings} {machine_facts(model)}")
    print(markdown_table(["from token", *perplexities], rows))
    _plot(starts, perplexities, settings, args.output / "endless.png")
    ratios = [mine / fresh for mine, fresh in zip(perplexities[REBASED], perplexities[FRESH], strict=True)]
    print(f"ratios: worst={max(ratios):.3f} mean={sum(ratios) / len(ratios):.3f}")
    return 0


def _measured(model: str, text: str, name: str, eviction: dict[str, Any], settings: dict[str, Any]) -> list[float]:
    """Perplexity of each stretch, by an engine in a process of its own: it gives its memory back."""
    with multiprocessing.get_context("spawn").Pool(1) as process:
        return process.apply(_losses, (model, text, name, eviction, settings))


def _losses(model: str, text: str, name: str, eviction: dict[str, Any], settings: dict[str, Any]) -> list[float]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    num_tokens, stretch, budget = settings["tokens"], settings["stretch"], settings["budget"]
    # Six characters a token and more to spare: the whole of the novels takes a while.
    tokens = AutoTokenizer.from_pretrained(model)(text[: 10 * num_tokens], add_special_tokens=False, verbose=False)
    tokens = tokens.input_ids[:num_tokens]
    longest = num_tokens if name != FRESH else budget + stretch
    llm = LLM(
        model,
        additional_config={"kv_eviction": eviction},
        distributed_executor_backend="uni",
        enforce_eager=True,
        dtype=settings["dtype"],
        block_size=PAGE_TOKENS,
        kv_cache_memory_bytes=kv_bytes_per_token(model, settings["dtype"]) * (budget + 4 * CHUNK_TOKENS),
        max_model_len=longest + 1,
        max_num_seqs=1,
        max_num_batched_tokens=CHUNK_TOKENS,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        # A longer table of rotations, so that vLLM lets positions go on.
        hf_overrides={} if eviction.get("positions") == "rebase" else {"max_position_embeddings": longest + 1},
    )
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False)

    def logprobs(prompt: list[int]) -> list[float]:
        """Of each token but the first."""
        [output] = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        flat = output.prompt_logprobs
        starts = flat.start_indices[1:]  # the token itself comes first
        return [flat.logprobs[start] for start in starts]

    if name == FRESH:
        found = []
        for start in range(0, num_tokens, stretch):
            before = tokens[max(start - budget, 0) : start]
            found.append(logprobs(before + tokens[start : start + stretch])[max(len(before) - 1, 0) :])
    else:
        whole = logprobs(tokens)
        found = [whole[max(start - 1, 0) : start + stretch - 1] for start in range(0, num_tokens, stretch)]
    return [math.exp(-sum(values) / len(values)) for values in found if len(values) > stretch // 2]


def _plot(starts: list[int], perplexities: dict[str, list[float]], settings: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, values in perplexities.items():
        axes.plot([start / 1000 for start in starts], values, marker=".", label=name)
    axes.set(
        xlabel="thousand tokens seen",
        ylabel=f"perplexity per {settings['stretch']:,} tokens",
        yscale="log",
        title=f"{settings['model']}, budget {settings['budget']:,} tokens",
    )
    axes.legend()
    axes.grid(alpha=0.3, which="both")
    figure.savefig(path, dpi=90, bbox_inches="tight")
    pyplot.close(figure)
