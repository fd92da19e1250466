"""Evicting before preempting: one load, a pool for 60 % of it, with and without a floor.

Plain vLLM preempts when the pool is full and computes the victim's tokens again later. With a floor, running requests
give up pages first. Same load, same pool, in turn; nothing is evicted while there is room in either.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from vllm_evict.bench import client
from vllm_evict.bench.load import PAGE_TOKENS, Measurement, Scenario, paired_ratio, spread
from vllm_evict.bench.model_facts import embedded_model, kv_bytes_per_token
from vllm_evict.bench.report import markdown_table
from vllm_evict.bench.server_process import ServerProcess

POOL_SHARE = 0.6
FLOOR_TOKENS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder of the model (default: the embedded one)")
    parser.add_argument("--policy", default="h2o", help="of the server with a floor")
    parser.add_argument("--requests", type=int, default=16, help="per run, all open at once")
    parser.add_argument("--rounds", type=int, default=2, help="interleaved")
    parser.add_argument("--dtype", default="bfloat16")


def run(args: argparse.Namespace) -> int:
    model = args.model or str(embedded_model())
    need = args.requests
    scenario = Scenario("pressure", 128, 512, FLOOR_TOKENS, POOL_SHARE * need, need, need, args.rounds)
    floor = ["--kv-eviction", args.policy, "--kv-eviction-budget", "unlimited"]
    flags = {"off": [], "floor": [*floor, "--kv-eviction-floor", str(FLOOR_TOKENS)]}
    runs: dict[str, list[Measurement]] = {name: [] for name in flags}
    servers: dict[str, ServerProcess] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, more in flags.items():
                options = _options(scenario, model, args.dtype) + more
                servers[name] = ServerProcess(model, options, Path(folder) / f"{name}.log")
                servers[name].wait_ready()
                client.warm_up(servers[name].url, scenario, model)
                servers[name].pause()
            for number in range(1, args.rounds + 1):
                for name, server in servers.items():
                    server.resume()
                    runs[name].append(client.measure(server.url, scenario, model, name, number))
                    server.pause()
                    print(f"  {name}: {runs[name][-1].output_tokens_per_second:.1f} tokens/s", file=sys.stderr)
        finally:
            for server in servers.values():
                server.stop()
    seconds = scenario.output_tokens
    rows = [
        [
            name,
            spread([m.output_tokens_per_second / seconds for m in measured], digits=3),
            spread([m.preemptions for m in measured]),
            spread([m.ms_to_first_token for m in measured]),
        ]
        for name, measured in runs.items()
    ]
    print(
        f"{scenario.shape}, {need} requests at once, pool of {scenario.usable_pages} pages = {POOL_SHARE:.0%} of need"
    )
    print(markdown_table(["", "requests/s", "preemptions", "ms to first token"], rows))
    ours, plain = ([m.output_tokens_per_second for m in runs[name]] for name in ("floor", "off"))
    saved = sum(m.preemptions for m in runs["off"]) - sum(m.preemptions for m in runs["floor"])
    print(f"ratios: floor/off={paired_ratio(ours, plain):.3f} preemptions_saved={saved}")
    return 0


def _options(scenario: Scenario, model: str, dtype: str) -> list[str]:
    kv_bytes = (scenario.usable_pages + 1) * kv_bytes_per_token(model, dtype) * PAGE_TOKENS
    options = ["--dtype", dtype, "--enforce-eager", "--served-model-name", "bench", "--seed", "0"]
    options += ["--block-size", str(PAGE_TOKENS), "--kv-cache-memory-bytes", str(kv_bytes)]
    options += ["--max-model-len", str(scenario.input_tokens + scenario.output_tokens + PAGE_TOKENS)]
    return [*options, "--max-num-batched-tokens", "512", "--max-num-seqs", str(scenario.concurrency)]
