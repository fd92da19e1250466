#!/usr/bin/env python3
"""Does eviction work on this GPU, in vLLM, with every attention backend? Needs this package installed beside GPU vLLM.

    python deploy/gpu-check/serve_check.py --model MODEL [--backends FLASH_ATTN ...] [--runners 1] [--graphs on]

For every backend, model runner and with CUDA graphs on and off, three servers get the same prompts, one at a time,
with greedy sampling:

    off     without eviction
    roomy   h2o with a budget that no prompt reaches: the same tokens as off, nothing evicted
    tight   h2o with a small budget: pages are evicted, every answer is complete, no page is held at the end; the scores
            behind the first eviction of an answer are the same with CUDA graphs on and off

and TRITON_ATTN a fourth: tight with `--kv-eviction-score-kernel fused`, whose scores must be those of tight.

A server takes about a minute to start, so all 16 combinations take about an hour. Ends with one line:
`serve-check: ok` or `serve-check: FAILED`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BACKENDS = ("TRITON_ATTN", "FLASH_ATTN", "FLASHINFER", "XFORMERS")
MAX_MODEL_TOKENS, ANSWER_TOKENS, TIGHT_BUDGET_TOKENS = 4096, 96, 512
SHORT_OF_BUDGET = TIGHT_BUDGET_TOKENS - 64
Scores = list[float | None]
QUESTION = "\n\nIn one sentence: what is the text above about?"


@dataclass(frozen=True)
class Case:
    backend: str
    runner: str  # "0": V1 model runner, "1": V2
    graphs: str  # "on" or "off"

    def __str__(self) -> str:
        return f"{self.backend}, V{int(self.runner) + 1} model runner, CUDA graphs {self.graphs}"

    def options(self) -> list[str]:
        options = ["--attention-backend", self.backend, "--max-model-len", str(MAX_MODEL_TOKENS)]
        options += ["--served-model-name", "check", "--no-enable-prefix-caching", "--gpu-memory-utilization", "0.8"]
        return options if self.graphs == "on" else [*options, "--enforce-eager"]


def main() -> int:
    options = _parse()
    cases = [Case(*c) for c in itertools.product(options.backends, options.runners, options.graphs)]
    if options.list:
        print(*cases, sep="\n")
        return 0
    if options.model is None:
        print("serve-check: name a model with --model", file=sys.stderr)
        return 2
    sys.path.insert(0, str(ROOT))
    passed, scores = True, {}
    with tempfile.TemporaryDirectory(prefix="serve-check-") as folder:
        for case in cases:
            try:
                faults = _faults(case, options.model, Path(folder), scores)
            except (RuntimeError, OSError) as error:
                faults = [str(error)]
            passed &= not faults
            print("FAILED" if faults else "ok    ", case, flush=True)
            for fault in faults:
                print("      ", fault, flush=True)
    print(f"serve-check: {'ok' if passed else 'FAILED'}")
    return 0 if passed else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or name; context of at least 4096 tokens")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--runners", nargs="+", choices=("0", "1"), default=("0", "1"), help="VLLM_USE_V2_MODEL_RUNNER")
    parser.add_argument("--graphs", nargs="+", choices=("on", "off"), default=("on", "off"))
    parser.add_argument("--list", action="store_true", help="print the combinations and stop")
    return parser.parse_args()


def _faults(case: Case, model: str, folder: Path, scores: dict[tuple[str, str], Scores]) -> list[str]:
    """What is wrong, in words; `scores` of the same backend and runner are compared, whichever came first."""
    trace = folder / "trace.jsonl"
    trace.unlink(missing_ok=True)
    eviction = ["--kv-eviction", "h2o", "--kv-eviction-trace", str(trace), "--kv-eviction-budget"]
    off, _ = _answers(case, model, [], folder)
    roomy, _ = _answers(case, model, [*eviction, str(MAX_MODEL_TOKENS)], folder)
    faults = []
    if roomy != off:
        different = [i for i, (a, b) in enumerate(zip(off, roomy, strict=True)) if a != b]
        faults.append(f"other tokens in the answers {different}")
    if _evicted_pages(trace):
        faults.append(f"{_evicted_pages(trace)} pages evicted with a budget that no prompt reaches")
    every_token = ["--kv-eviction-score-every", "1"]
    tight, usage = _answers(case, model, [*eviction, str(TIGHT_BUDGET_TOKENS), *every_token], folder)
    if not _evicted_pages(trace):
        faults.append(f"nothing evicted with a budget of {TIGHT_BUDGET_TOKENS} tokens")
    found = _scores_of_last_prompt(trace)
    expected = scores.setdefault((case.backend, case.runner), found)
    if not found or not same_scores(found, expected):
        faults.append(f"attention scores {found}, with CUDA graphs the other way {expected}")
    if any(len(answer) != ANSWER_TOKENS for answer in tight):
        faults.append("an answer is not complete")
    if usage != 0:
        faults.append(f"{usage:.1%} of the pool is held when every request is done")
    if case.backend == "TRITON_ATTN":
        trace.unlink()
        options = [*eviction, str(TIGHT_BUDGET_TOKENS), *every_token, "--kv-eviction-score-kernel", "fused"]
        _answers(case, model, options, folder)
        fused = _scores_of_last_prompt(trace)
        if not same_scores(fused, found):
            faults.append(f"attention scores {fused} with --kv-eviction-score-kernel fused, {found} without")
    return faults


def _answers(case: Case, model: str, options: Sequence[str], folder: Path) -> tuple[list[list[int]], float]:
    """(token ids of every answer, share of the pool held at the end)."""
    from vllm_evict.bench.client import metric
    from vllm_evict.bench.server_process import ServerProcess

    environment = {"VLLM_USE_V2_MODEL_RUNNER": case.runner}
    server = ServerProcess(model, [*case.options(), *options], folder / "server.log", environment)
    server.wait_ready()
    try:
        answers = [_complete(server.url, prompt) for prompt in _prompts()]
        with urllib.request.urlopen(server.url + "/metrics", timeout=60) as response:
            usage = metric(response.read().decode(), "vllm:kv_cache_usage_perc")
    finally:
        server.stop()
    return answers, usage


def _prompts() -> list[str | list[int]]:
    """Public text that lies at hand, about 60, 600 and 2400 tokens; and one that only its answer takes over budget."""
    text = (ROOT / "LICENSE").read_text()
    return [*(text[:length] + QUESTION for length in (250, 2500, 10500)), list(range(1000, 1000 + SHORT_OF_BUDGET))]


def _complete(url: str, prompt: str | list[int]) -> list[int]:
    wish = {
        "model": "check",
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(wish).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)["choices"][0]["token_ids"]


def _evictions(trace: Path) -> list[dict]:
    return [json.loads(line) for line in trace.read_text().splitlines()] if trace.exists() else []


def _evicted_pages(trace: Path) -> int:
    return sum(len(eviction["pages"]) for eviction in _evictions(trace))


def _scores_of_last_prompt(trace: Path) -> Scores:
    """Attention scores of its pages when the first of them went: of all its prompt, and of 64 decoded tokens."""
    evictions = _evictions(trace)
    of_last = [e for e in evictions if e["request"] == evictions[-1]["request"]]
    return of_last[0]["scores"]["attention"] if of_last else []


def same_scores(found: Scores, expected: Scores) -> bool:
    """Up to rounding: page by page within 5 % of the highest; a page that nobody has judged is None in both."""
    tolerance = 0.05 * max((abs(score) for score in expected if score is not None), default=0.0)
    return len(found) == len(expected) and all(
        a is b if a is None or b is None else abs(a - b) <= tolerance for a, b in zip(found, expected, strict=True)
    )


if __name__ == "__main__":
    sys.exit(main())
