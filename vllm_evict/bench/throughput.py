"""Throughput under batching: the same load on servers that differ in policy and pool size, in turn.

Real servers, vLLM's own client (`vllm bench serve`, random prompts, fixed lengths, seeded). A *short pool* holds a few
full requests, a *roomy* one all of them. The servers of a scenario are up together, all but the one measured paused,
and each round runs all of them, so that ratios compare neighbours in time.

Every part leaves one JSON file in the output folder, and the report is made of all files there. So a long benchmark
can be run in pieces (`--only`), and a piece can be repeated.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from vllm_evict.bench import client, context
from vllm_evict.bench.load import (
    PAGE_TOKENS,
    POLICIES,
    Measurement,
    Scenario,
    ScenarioResult,
    full_scenarios,
    quick_scenarios,
)
from vllm_evict.bench.model_facts import embedded_model, kv_bytes_per_token
from vllm_evict.bench.report import machine_facts, throughput_report, write_json
from vllm_evict.bench.server_process import ServerProcess
from vllm_evict.config import EvictionConfig
from vllm_evict.pages import PageBudget, PageView
from vllm_evict.policies import get_policy

CONTEXT = "context"
"""The part that is no scenario: time per token against context length."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder of the model (default: the embedded one)")
    parser.add_argument(
        "--quick", action="store_true", help="the parts behind the ratios, two rounds, under 20 minutes"
    )
    parser.add_argument("--only", nargs="*", metavar="PART", help="only these parts; without a name only report")
    parser.add_argument("--requests", type=int, default=24, help="requests per run, all open at once")
    parser.add_argument("--rounds", type=int, help="interleaved rounds (default: 2 with --quick, else 3)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--output", type=Path, default=Path("build/throughput"), help="folder for JSON, Markdown, PNG")


def run(args: argparse.Namespace) -> int:
    model = args.model or str(embedded_model())
    rounds = args.rounds or (2 if args.quick else 3)
    scenarios = {s.name: s for s in (quick_scenarios if args.quick else full_scenarios)(args.requests, rounds)}
    parts = _chosen_parts([*scenarios, CONTEXT], args.only)
    args.output.mkdir(parents=True, exist_ok=True)
    # `finally` must stop the servers, which a paused one does not do by itself.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    facts = machine_facts(model) | {"dtype": args.dtype}
    for part in parts:
        start = time.monotonic()
        if part == CONTEXT:
            result = context.measure(model, args.dtype, facts, context.QUICK if args.quick else context.FULL)
        else:
            result = _run_scenario(scenarios[part], args.dtype, model, facts)
        write_json(args.output / f"{part}.json", result)
        _say(f"{part}: {time.monotonic() - start:.0f} s")
    print(throughput_report(args.output))
    return 0


def _chosen_parts(parts: list[str], only: list[str] | None) -> list[str]:
    unknown = set(only or ()) - set(parts)
    if unknown:
        raise SystemExit(f"--only got {', '.join(sorted(unknown))}; the parts are {', '.join(parts)}.")
    return parts if only is None else only


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# ---- one scenario ----------------------------------------------------------------


def _run_scenario(scenario: Scenario, dtype: str, model: str, facts: dict[str, str]) -> ScenarioResult:
    _say(f"{scenario.name}: {scenario.usable_pages} usable pages, starting servers ...")
    measurements: list[Measurement] = []
    servers: dict[str, ServerProcess] = {}
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "h2o.jsonl"
        try:
            for policy in POLICIES:
                options = _options(scenario, policy, dtype, model, trace)
                servers[policy] = ServerProcess(model, options, Path(folder) / f"{policy}.log")
            for server in servers.values():
                server.wait_ready()
            for server in servers.values():
                client.warm_up(server.url, scenario, model)
                server.pause()
            trace.write_text("")  # of the warm-up
            for number in range(1, scenario.rounds + 1):
                # To and fro, so that a steady drift of the machine favours nobody.
                for policy in POLICIES if number % 2 else POLICIES[::-1]:
                    server = servers[policy]
                    server.resume()
                    measured = client.measure(server.url, scenario, model, policy, number)
                    server.pause()
                    measurements.append(measured)
                    _say(
                        f"  {scenario.name}, {policy}: {measured.output_tokens_per_second:.1f} output tokens/s, "
                        f"{measured.preemptions} preemptions"
                    )
        except BaseException:
            for policy, server in servers.items():
                _say(f"--- the end of the log of {policy}:\n{server.log.read_text()[-1500:]}")
            raise
        finally:
            for server in servers.values():
                server.stop()
        budget = EvictionConfig(policy="h2o", budget=scenario.budget_tokens).page_budget(PAGE_TOKENS)
        different = different_victims(trace.read_text().splitlines(), budget)
    return ScenarioResult(facts, scenario, tuple(measurements), different)


def _options(scenario: Scenario, policy: str, dtype: str, model: str, trace: Path) -> list[str]:
    num_pages = scenario.usable_pages + 1  # and the null block
    kv_bytes = num_pages * kv_bytes_per_token(model, dtype) * PAGE_TOKENS
    # One page more than the load needs: random prompts may grow by a token when tokenised again.
    max_model_len = scenario.input_tokens + scenario.output_tokens + PAGE_TOKENS
    options = ["--dtype", dtype, "--enforce-eager", "--served-model-name", "bench", "--seed", "0"]
    options += ["--block-size", str(PAGE_TOKENS), "--max-model-len", str(max_model_len)]
    options += ["--max-num-batched-tokens", "512", "--max-num-seqs", str(scenario.concurrency)]
    # The server's front end and the client run on the engine's cores: answers in pieces of 16 tokens disturb it less.
    options += ["--kv-cache-memory-bytes", str(kv_bytes), "--stream-interval", "16"]
    if policy != "off":
        options += ["--kv-eviction", policy, "--kv-eviction-budget", str(scenario.budget_tokens)]
    if policy == "h2o":
        options += ["--kv-eviction-trace", str(trace)]
    return options


def different_victims(trace: Iterable[str], budget: PageBudget) -> float | None:
    """Share of h2o's decisions in which streaming would have evicted other pages of the same state.

    Args:
        trace: lines of `--kv-eviction-trace`.
        budget: of h2o.

    """
    streaming = get_policy("streaming")
    decisions = different = 0
    for line in map(json.loads, trace):
        num_tokens = line["num_computed_tokens"]
        view = PageView(np.array(line["resident"]), num_tokens, num_tokens)
        decisions += 1
        different += streaming.plan(view, budget).pages != tuple(line["pages"])
    return different / decisions if decisions else None
