"""Quality on real text, through the product's own policies: plain text, and recall of a passage seen once.

Every stretch of text is kept as one JSON file in the output folder: a run that was cut short goes on where it stopped.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_evict.bench.model_facts import embedded_model
from vllm_evict.bench.text import chosen_text
from vllm_evict.config import EvictionConfig
from vllm_evict.scores.aggregate import SCORE_KINDS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from vllm_evict.bench.quality.cases import Context
    from vllm_evict.bench.quality.replay import Method
    from vllm_evict.bench.quality.results import Measured

BUDGET_SHARES = (0.5, 0.25)
PAGES = (16, 32)  # tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__.splitlines()[0]
    parser.add_argument("--model", help="folder of the model (default: the embedded one)")
    parser.add_argument("--text", help="file with a long text (default: six novels of Debian's r-cran-janeaustenr)")
    parser.add_argument("--quick", action="store_true", help="four stretches: minutes, and wide intervals")
    parser.add_argument("--stretches", type=int, help="stretches of text, three passages each (default: 16; quick: 4)")
    parser.add_argument("--context-tokens", type=int, default=1536, help="tokens of a stretch")
    parser.add_argument("--passage-tokens", type=int, default=64, help="tokens of a passage that is read again")
    parser.add_argument("--chunk-tokens", type=int, default=32, help="tokens of a step; a multiple of 32")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--seed", type=int, default=0, help="of the stretches, the passages and the random policy")
    parser.add_argument("--jobs", type=int, default=2, help="stretches measured side by side")
    parser.add_argument("--at-most", type=int, help="measure this many stretches, report, stop; run again to go on")
    parser.add_argument("--output", type=Path, default=Path("bench-quality"), help="folder for JSON, Markdown, PNG")


def methods(budget_tokens: int, seed: int) -> list[Method]:
    """Everything that is compared at one budget, at every page size."""
    from vllm_evict.bench.quality.replay import Method

    settings: dict[str, dict[str, Any]] = {
        "plain window": {"policy": "streaming", "sink": 0},
        "streaming": {"policy": "streaming"},
        "random": {"policy": "random", "seed": seed},
        **{f"h2o {score}": {"policy": "h2o", "score": score} for score in SCORE_KINDS},
        "keydiff": {"policy": "keydiff"},
        "h2o-keydiff": {"policy": "h2o-keydiff"},
    }
    return [
        Method(name, EvictionConfig(budget=budget_tokens, **chosen), page_tokens)
        for page_tokens in PAGES
        for name, chosen in settings.items()
    ]


def run(args: argparse.Namespace) -> int:
    from vllm_evict.bench.quality.report import write_report
    from vllm_evict.bench.quality.results import Measured, Results
    from vllm_evict.bench.report import machine_facts

    model_path = args.model or str(embedded_model())
    settings = _settings(args, model_path, chosen_text(args.text)[0])
    args.output.mkdir(parents=True, exist_ok=True)
    paths = {number: args.output / f"stretch-{number}.json" for number in range(settings["stretches"])}
    missing = [number for number, path in paths.items() if not _is_done(path, settings)]
    if missing[: args.at_most]:
        _measure({number: paths[number] for number in missing[: args.at_most]}, settings, args)
    done = [path for path in paths.values() if path.exists()]
    measured = [Measured(**values) for path in done for values in json.loads(path.read_text())["measured"]]
    facts = machine_facts(model_path)
    settings |= {"stretches": len(done)}
    everything = {"facts": facts, "settings": settings, "measured": [asdict(m) for m in measured]}
    (args.output / "quality.json").write_text(json.dumps(everything) + "\n")
    print(write_report(Results(measured), settings, facts, args.output))
    if len(done) < len(paths):
        print(f"{len(done)} of {len(paths)} stretches: run the same command again to go on", file=sys.stderr)
    return 0


def _settings(args: argparse.Namespace, model_path: str, text_name: str) -> dict[str, Any]:
    from vllm_evict.bench.quality.cases import PLACES_PER_CONTEXT

    if args.chunk_tokens % max(PAGES):
        raise SystemExit(f"--chunk-tokens {args.chunk_tokens}: give a multiple of {max(PAGES)}, the largest page")
    return {
        "model": Path(model_path).name,
        "text": text_name,
        "stretches": args.stretches or (4 if args.quick else 16),
        "passages": PLACES_PER_CONTEXT,
        "context_tokens": args.context_tokens,
        "passage_tokens": args.passage_tokens,
        "chunk_tokens": args.chunk_tokens,
        "dtype": args.dtype,
        "seed": args.seed,
    }


def _is_done(path: Path, settings: dict[str, Any]) -> bool:
    if not path.exists():
        return False
    if json.loads(path.read_text())["settings"] != settings:
        raise SystemExit(f"{path} was measured with other settings: give another --output")
    return True


def _measure(paths: dict[int, Path], settings: dict[str, Any], args: argparse.Namespace) -> None:
    """Side by side in processes with threads of their own: two of one thread get further than one of two."""
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as processes:
        threads = max(len(os.sched_getaffinity(0)) // args.jobs, 1)
        futures = [
            processes.submit(_measure_stretch, number, path, settings, args.model, args.text, threads)
            for number, path in paths.items()
        ]
        for future in as_completed(futures):
            future.result()


def _measure_stretch(
    number: int, path: Path, settings: dict[str, Any], model_path: str | None, text_path: str | None, threads: int
) -> None:
    import torch

    from vllm_evict.bench.quality.cases import contexts

    torch.set_num_threads(threads)
    model, tokens = _load(model_path or str(embedded_model()), settings["dtype"], text_path)
    stretches = contexts(
        tokens,
        settings["stretches"],
        context_tokens=settings["context_tokens"],
        passage_tokens=settings["passage_tokens"],
        seed=settings["seed"],
    )
    measured = _read(model, stretches[number], settings)
    value = {"settings": settings, "measured": [asdict(m) for m in measured]}
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(value) + "\n")
    unfinished.rename(path)


@functools.cache
def _load(model_path: str, dtype: str, text_path: str | None):
    """The model, and the tokens of the text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from vllm_evict.bench.quality.replay import ATTENTION

    model = AutoModelForCausalLM.from_pretrained(
        model_path, attn_implementation=ATTENTION, dtype=getattr(torch, dtype)
    ).eval()
    text = chosen_text(text_path)[1]
    return model, AutoTokenizer.from_pretrained(model_path)(text, add_special_tokens=False, verbose=False).input_ids


def _read(model: PreTrainedModel, stretch: Context, settings: dict[str, Any]) -> list[Measured]:
    from vllm_evict.bench.quality.measure import Clock, cases_of, read_full, read_methods, read_reference
    from vllm_evict.reference import H2OCache, StreamingCache

    chunk_tokens, context_tokens = settings["chunk_tokens"], settings["context_tokens"]
    clock = Clock(lambda line: print(line, file=sys.stderr, flush=True))
    cases = cases_of(stretch)
    measured = read_full(model, cases)
    for budget in (int(share * context_tokens) for share in BUDGET_SHARES):
        measured += read_methods(model, cases, methods(budget, settings["seed"] + stretch.number), chunk_tokens)
        references = {
            "tokens: streaming": StreamingCache(4, budget - 4, positions="original"),
            "tokens: h2o sum": H2OCache(budget, 4, budget // 2, one_decision=True),
        }
        for name, cache in references.items():
            measured += read_reference(model, name, cache, cases, chunk_tokens)
        clock.tick(f"stretch {stretch.number}, budget {budget}")
    return measured
