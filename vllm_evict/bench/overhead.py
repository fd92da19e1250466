"""What eviction costs a decode step, and what observing only some queries costs in chosen pages.

Three engines - no eviction, streaming, h2o - decode the same batch in turn, below the budget (nothing is evicted:
pure overhead) and above it. The overlap line replays real text token by token and compares the pages that h2o
evicts at the given --score-every with those it evicts when every token is scored.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from vllm_evict.bench.engine_process import EngineProcess
from vllm_evict.bench.model_facts import embedded_model, kv_bytes_per_token
from vllm_evict.bench.text import real_text
from vllm_evict.config import DEFAULT_SCORE_EVERY

POLICIES = ("off", "streaming", "h2o")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder of the model (default: the embedded one)")
    parser.add_argument("--batch", type=int, default=16, help="requests decoding together")
    parser.add_argument("--budget", type=int, default=1024, help="tokens")
    parser.add_argument("--new-tokens", type=int, default=17, help="decoded per request and round")
    parser.add_argument("--rounds", type=int, default=16, help="short interleaved rounds; medians are reported")
    parser.add_argument("--score-every", type=int, default=DEFAULT_SCORE_EVERY, help="of h2o")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--text", help="file with real text (default: the Python language reference)")
    parser.add_argument("--part", choices=("all", "speed", "overlap"), default="all")


def run(args: argparse.Namespace) -> int:
    model = args.model or str(embedded_model())
    tokens = _tokenize(model, real_text(args.text))
    ratios = _speed(args, model, tokens) if args.part != "overlap" else {}
    if args.part != "speed":
        ratios["overlap"] = _overlap(args, model, tokens)
    print("ratios: " + " ".join(f"{name}={value:.3f}" for name, value in ratios.items()))
    return 0


# ---- speed ---------------------------------------------------------------------


def _speed(args: argparse.Namespace, model: str, tokens: list[int]) -> dict[str, float]:
    """Median ratios of decode speed, round by round."""
    max_tokens = args.budget + 3 * args.new_tokens
    common = dict(
        dtype=args.dtype,
        max_model_len=max_tokens + args.new_tokens,
        max_num_seqs=args.batch,
        block_size=32,
        kv_cache_memory_bytes=kv_bytes_per_token(model, args.dtype) * 2 * args.batch * (max_tokens + 64),
        skip_tokenizer_init=True,
    )
    eviction = {
        "off": None,
        "streaming": {"policy": "streaming", "budget": args.budget},
        "h2o": {"policy": "h2o", "budget": args.budget, "score_every": args.score_every},
    }
    # Prefixes stay cached from the warm-up on, so that rounds are decoding and little else.
    states = {
        "below budget": _passages(tokens, args.batch, args.budget - args.new_tokens - 32),
        "above budget": _passages(tokens, args.batch, args.budget + args.new_tokens),
    }
    engines = {policy: EngineProcess(model, eviction[policy], **common) for policy in POLICIES}
    speeds: dict[tuple[str, str], list[float]] = defaultdict(list)
    try:
        for state, prompts in states.items():
            for engine in engines.values():
                engine.decode(prompts, args.new_tokens)
            for _ in range(args.rounds):
                for policy, engine in engines.items():
                    timing = engine.decode(prompts, args.new_tokens)
                    speeds[state, policy].append(timing.tokens_per_second)
                    print(f"  {state}, {policy}: {timing.tokens_per_second:.1f} tokens/s", file=sys.stderr, flush=True)
    finally:
        for engine in engines.values():
            engine.close()

    def ratio(state: str, above: str, below: str) -> float:
        pairs = zip(speeds[state, above], speeds[state, below], strict=True)
        return statistics.median(a / b for a, b in pairs)

    print(f"{'':14}" + "".join(f"{policy:>22}" for policy in POLICIES) + "   output tokens/s, median [min, max]")
    for state in states:
        cells = []
        for policy in POLICIES:
            values = speeds[state, policy]
            cells.append(f"{statistics.median(values):.1f} [{min(values):.1f}, {max(values):.1f}]")
        h2o, streaming = ratio(state, "h2o", "streaming"), ratio(state, "streaming", "off")
        print(
            f"{state:14}"
            + "".join(f"{cell:>22}" for cell in cells)
            + f"   h2o/streaming {h2o:.3f}, streaming/off {streaming:.3f}"
        )
    return {
        "h2o/streaming": min(ratio(state, "h2o", "streaming") for state in states),
        "streaming/off": ratio("below budget", "streaming", "off"),
        "h2o/off": ratio("below budget", "h2o", "off"),
    }


# ---- overlap -------------------------------------------------------------------


def _overlap(args: argparse.Namespace, model: str, tokens: list[int]) -> float:
    """Share of the pages evicted with every step scored that are evicted at `--score-every` too."""
    budget = args.budget // 2
    prompts = _passages(tokens, args.batch // 2, 2 * args.budget // 2 + args.budget // 4)
    evicted = {}
    for score_every in (1, args.score_every):
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.jsonl"
            engine = EngineProcess(
                model,
                {"policy": "h2o", "budget": budget, "score_every": score_every, "trace": str(trace)},
                dtype=args.dtype,
                max_model_len=len(prompts[0]) + 32,
                max_num_seqs=len(prompts),
                block_size=32,
                enable_prefix_caching=False,
                skip_tokenizer_init=True,
                kv_cache_memory_bytes=kv_bytes_per_token(model, args.dtype) * len(prompts) * (len(prompts[0]) + 512),
                # One token of each request a step: real text, decoded.
                long_prefill_token_threshold=1,
            )
            try:
                engine.prefill(prompts)
            finally:
                engine.close()
            evicted[score_every] = _evicted_pages(trace)
    common = sum(len(evicted[1][key] & evicted[args.score_every][key]) for key in evicted[1])
    total = sum(len(pages) for pages in evicted[1].values())
    print(
        f"overlap: {common} of {total} pages evicted from {len(prompts)} passages of {len(prompts[0])} tokens, "
        f"budget {budget}, scored every token, go at --kv-eviction-score-every {args.score_every} too"
    )
    return common / total


def _evicted_pages(trace: Path) -> dict[str, set[int]]:
    pages: dict[str, set[int]] = defaultdict(set)
    for line in trace.read_text().splitlines():
        eviction = json.loads(line)
        # vLLM appends a random tail to the id it was given.
        pages[eviction["request"].rsplit("-", 1)[0]] |= set(eviction["pages"])
    return pages


# ---- text ----------------------------------------------------------------------


def _tokenize(model: str, text: str) -> list[int]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)(text)["input_ids"]


def _passages(tokens: list[int], number: int, length: int) -> list[list[int]]:
    """`number` passages of `length` tokens, evenly spread over the text and different from one another."""
    stride = (len(tokens) - length) // number
    return [tokens[i * stride : i * stride + length] for i in range(number)]
