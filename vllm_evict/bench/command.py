"""`vllm-evict bench NAME`: one module per benchmark, each with `add_arguments` and `run`."""

import argparse
import importlib

# name: (module, help)
BENCHMARKS: dict[str, tuple[str, str]] = {
    "throughput": ("vllm_evict.bench.throughput", "tokens/s under batching, by policy and pool size"),
    "scheduler": ("vllm_evict.bench.scheduler", "what eviction adds to a scheduler step, without a model"),
    "quality": ("vllm_evict.bench.quality.command", "how good answers stay: plain text, recall of what was seen once"),
    "pressure": ("vllm_evict.bench.pressure", "a pool for 60 % of the load: a floor against preemption"),
    "soak": ("vllm_evict.bench.soak", "memory of every server process under mixed load for a long time"),
    "kernels": ("vllm_evict.bench.kernel_table", "registers and shared memory of the Triton kernels, without a GPU"),
    "stream": ("vllm_evict.bench.stream", "one request of 4 million tokens: time per token and memory at both ends"),
    "stream-quality": ("vllm_evict.bench.stream_quality", "perplexity of a stream past its model's length"),
    "overhead": ("vllm_evict.bench.overhead", "decode speed of h2o, streaming and no eviction, side by side"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, (module_name, summary) in BENCHMARKS.items():
        benchmark = benchmarks.add_parser(name, help=summary, description=summary)
        module = importlib.import_module(module_name)
        module.add_arguments(benchmark)
        benchmark.set_defaults(run_benchmark=module.run)


def run(args: argparse.Namespace) -> int:
    return args.run_benchmark(args)
