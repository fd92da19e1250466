"""Throughput under batching: the same load on servers that differ in policy and pool size, in turn.

Real servers, vLLM's own client (`vllm bench serve`, random prompts, fixed lengths, seeded). A *short pool* holds a few
full requests, a *roomy* one all of them. The servers of a scenario are up together, all but the one measured paused,
and each round runs all of them, so that ratios compare neighbours in time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from vllm_evict.bench.model_facts import embedded_model, kv_bytes_per_token
from vllm_evict.bench.report import machine_facts, markdown_table, write_json
from vllm_evict.bench.server_process import ServerProcess
from vllm_evict.config import EvictionConfig
from vllm_evict.pages import PageView, pages_for
from vllm_evict.policies import get_policy

PAGE_TOKENS = 32
POLICIES = ("off", "streaming", "h2o")
PREEMPTIONS = "vllm:num_preemptions_total"


@dataclass(frozen=True)
class Scenario:
    """One load on one pool.

    Args:
        name: how it is called in results.
        input_tokens: prompt length, of which the first `prefix_tokens` are the same for all.
        output_tokens: answer length.
        budget_tokens: of streaming and h2o.
        full_requests: how many requests without eviction the pool holds.
        concurrency: requests the client keeps open.

    """

    name: str
    input_tokens: int
    output_tokens: int
    budget_tokens: int
    full_requests: float
    concurrency: int
    prefix_tokens: int = 0

    @property
    def pool_pages(self) -> int:
        """Pages of the pool, the null block included."""
        return round(self.full_requests * pages_for(self.input_tokens + self.output_tokens, PAGE_TOKENS)) + 1


@dataclass(frozen=True)
class Measurement:
    """One run of the client."""

    scenario: str
    policy: str
    round: int
    output_tokens_per_second: float
    mean_ms_per_output_token: float
    preemptions: int


def quick_scenarios(concurrency: int) -> list[Scenario]:
    """The short and the roomy pool of the H2O paper's 20 % budget."""
    return [
        Scenario("short_pool", 128, 512, 128, 4, concurrency),
        Scenario("roomy", 128, 512, 128, concurrency, concurrency),
    ]


def full_scenarios(concurrency: int) -> list[Scenario]:
    """The quick ones, pool sizes down to 15 % of need, and other shapes of work."""
    need = concurrency
    pools = [Scenario(f"pool_{share}%", 128, 512, 128, need * share / 100, need) for share in (15, 25, 50, 75)]
    shapes = [
        Scenario("long_prompt", 1024, 64, 256, 4, need),
        Scenario("mixed", 512, 256, 256, 4, need),
        Scenario("shared_prefix", 512, 256, 256, 4, need, prefix_tokens=448),
    ]
    return quick_scenarios(concurrency) + pools + shapes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder of the model (default: the embedded one)")
    parser.add_argument("--quick", action="store_true", help="short and roomy pool only, two rounds")
    parser.add_argument("--requests", type=int, default=24, help="requests per run")
    parser.add_argument("--concurrency", type=int, default=24, help="requests open at once")
    parser.add_argument("--rounds", type=int, help="interleaved rounds (default: 2 with --quick, else 3)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--output", type=Path, default=Path("bench-throughput"), help="folder for JSON, Markdown, PNG")


def run(args: argparse.Namespace) -> int:
    model = args.model or str(embedded_model())
    rounds = args.rounds or (2 if args.quick else 3)
    scenarios = (quick_scenarios if args.quick else full_scenarios)(args.concurrency)
    args.output.mkdir(parents=True, exist_ok=True)
    measurements: list[Measurement] = []
    for scenario in scenarios:
        measurements += _run_scenario(scenario, args, model, rounds)
    different = _different_victims(args, model)
    facts = machine_facts(model)
    write_json(
        args.output / "throughput.json",
        {
            "facts": facts,
            "scenarios": [asdict(s) | {"pool_pages": s.pool_pages} for s in scenarios],
            "measurements": [asdict(m) for m in measurements],
            "h2o_victims_different_from_streaming": different,
        },
    )
    table = _table(scenarios, measurements)
    (args.output / "throughput.md").write_text(f"{json.dumps(facts)}\n\n{table}\n")
    print(table)
    if not args.quick:
        from vllm_evict.bench.plots import plot_throughput

        print("plots:", *plot_throughput(scenarios, measurements, args.output))
    ratios = {(s, p): _ratio(measurements, s, p) for s in ("short_pool", "roomy") for p in ("streaming", "h2o")}
    print(
        f"victims: h2o chose other pages than streaming in {different:.1%} of decisions (256 in / 768 out, budget 256)"
    )
    print(
        f"ratios: short_pool streaming/off={ratios['short_pool', 'streaming']:.3f} "
        f"h2o/off={ratios['short_pool', 'h2o']:.3f} roomy streaming/off={ratios['roomy', 'streaming']:.3f} "
        f"h2o/off={ratios['roomy', 'h2o']:.3f}"
    )
    return 0


# ---- one scenario ----------------------------------------------------------------


def _run_scenario(scenario: Scenario, args: argparse.Namespace, model: str, rounds: int) -> list[Measurement]:
    print(f"{scenario.name}: {scenario.pool_pages - 1} usable pages, starting servers ...", file=sys.stderr)
    measurements = []
    with tempfile.TemporaryDirectory() as folder:
        servers = _start_servers(scenario, POLICIES, args, model, Path(folder))
        try:
            for number in range(rounds + 1):
                for policy, server in servers.items():
                    server.resume()
                    # Round 0 warms up, with fewer requests.
                    measured = _run_client(server, scenario, args, model, number, policy)
                    server.pause()
                    if number > 0:
                        measurements.append(measured)
                        print(f"  {measured}", file=sys.stderr)
        finally:
            for server in servers.values():
                server.stop()
    return measurements


def _start_servers(
    scenario: Scenario, policies: tuple[str, ...], args: argparse.Namespace, model: str, folder: Path
) -> dict[str, ServerProcess]:
    """Up and paused, one per policy. One after the other: starting all at once takes longer."""
    servers: dict[str, ServerProcess] = {}
    try:
        for policy in policies:
            server = ServerProcess(model, _options(scenario, policy, args, model, folder), folder / f"{policy}.log")
            servers[policy] = server
            server.wait_ready()
            server.pause()
    except BaseException:
        for server in servers.values():
            server.stop()
        raise
    return servers


def _options(scenario: Scenario, policy: str, args: argparse.Namespace, model: str, folder: Path) -> list[str]:
    page_bytes = kv_bytes_per_token(model, args.dtype) * PAGE_TOKENS
    max_model_len = scenario.input_tokens + scenario.output_tokens
    options = ["--dtype", args.dtype, "--enforce-eager", "--served-model-name", "bench", "--seed", "0"]
    options += ["--block-size", str(PAGE_TOKENS), "--max-model-len", str(max_model_len)]
    options += ["--max-num-batched-tokens", "512", "--max-num-seqs", str(scenario.concurrency)]
    options += ["--kv-cache-memory-bytes", str(scenario.pool_pages * page_bytes), "--disable-log-requests"]
    if policy != "off":
        options += ["--kv-eviction", policy, "--kv-eviction-budget", str(scenario.budget_tokens)]
        options += ["--kv-eviction-trace", str(folder / f"{policy}.jsonl")]
    return options


def _run_client(
    server: ServerProcess, scenario: Scenario, args: argparse.Namespace, model: str, number: int, policy: str
) -> Measurement:
    preemptions = server.metric(PREEMPTIONS)
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).with_name("vllm")), "bench", "serve", "--backend", "openai"]
        command += ["--base-url", server.url, "--model", "bench", "--tokenizer", model]
        command += ["--dataset-name", "random", "--ignore-eos", "--temperature", "0"]
        command += ["--random-input-len", str(scenario.input_tokens - scenario.prefix_tokens)]
        command += ["--random-prefix-len", str(scenario.prefix_tokens)]
        command += ["--random-output-len", str(scenario.output_tokens if number else 16)]
        command += ["--num-prompts", str(args.requests if number else 4)]
        # The same prompts for all policies, new ones each round: no prefix hits but those of the scenario.
        command += ["--seed", str(number), "--max-concurrency", str(scenario.concurrency)]
        command += ["--save-result", "--result-dir", folder, "--result-filename", "result.json"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"vllm bench serve failed:\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
        result = json.loads((Path(folder) / "result.json").read_text())
    if result["completed"] != (args.requests if number else 4):
        raise RuntimeError(f"only {result['completed']} requests completed; see {server.log}")
    return Measurement(
        scenario.name,
        policy,
        number,
        result["output_throughput"],
        result["mean_tpot_ms"],
        int(server.metric(PREEMPTIONS) - preemptions),
    )


# ---- what h2o chooses --------------------------------------------------------------


def _different_victims(args: argparse.Namespace, model: str) -> float:
    """Share of h2o's decisions in which streaming would have evicted another page of the same state."""
    scenario = Scenario("victims", 256, 768, 256, 8, 8)
    config = EvictionConfig(policy="h2o", budget=scenario.budget_tokens)
    budget = config.page_budget(PAGE_TOKENS)
    streaming = get_policy("streaming")
    with tempfile.TemporaryDirectory() as folder:
        server = _start_servers(scenario, ("h2o",), args, model, Path(folder))["h2o"]
        try:
            server.resume()
            load = argparse.Namespace(**vars(args) | {"requests": 8})
            _run_client(server, scenario, load, model, 1, "h2o")
        finally:
            server.stop()
        lines = (Path(folder) / "h2o.jsonl").read_text().splitlines()
    different = 0
    for line in map(json.loads, lines):
        view = PageView(np.array(line["resident"]), line["num_computed_tokens"], line["num_computed_tokens"])
        different += streaming.plan(view, budget).pages != tuple(line["pages"])
    return different / max(len(lines), 1)


# ---- results ------------------------------------------------------------------------


def _by_round(measurements: list[Measurement], scenario: str, policy: str) -> dict[int, float]:
    return {m.round: m.output_tokens_per_second for m in measurements if (m.scenario, m.policy) == (scenario, policy)}


def _ratio(measurements: list[Measurement], scenario: str, policy: str) -> float:
    ours, off = (_by_round(measurements, scenario, p) for p in (policy, "off"))
    return statistics.median(ours[number] / off[number] for number in off)


def _table(scenarios: list[Scenario], measurements: list[Measurement]) -> str:
    cells: dict[tuple[str, str], list[Measurement]] = defaultdict(list)
    for measurement in measurements:
        cells[measurement.scenario, measurement.policy].append(measurement)
    rows = []
    for scenario in scenarios:
        for policy in POLICIES:
            runs = cells[scenario.name, policy]
            speeds = [run.output_tokens_per_second for run in runs]
            rows.append(
                [
                    scenario.name,
                    f"{scenario.input_tokens}/{scenario.output_tokens}",
                    str(scenario.pool_pages - 1),
                    policy,
                    f"{statistics.median(speeds):.1f} [{min(speeds):.1f}, {max(speeds):.1f}]",
                    f"{_ratio(measurements, scenario.name, policy):.2f}",
                    f"{statistics.median(run.mean_ms_per_output_token for run in runs):.1f}",
                    str(max(run.preemptions for run in runs)),
                ]
            )
    header = ["scenario", "in/out", "pages", "policy", "output tokens/s", "x off", "ms/token", "preemptions"]
    return markdown_table(header, rows)
