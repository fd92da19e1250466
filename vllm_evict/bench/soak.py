"""Mixed load for a long time: does any process of the server grow?

Clients stream answers of random length to prompts of random length (some share a prefix, one in ten is far over the
budget) and leave at random. Resident memory of every process is sampled; the first fifth of the time is warm-up.

oneDNN would hide a leak: it caches compiled matrix products by their number of tokens, 1,024 of them for all layers,
and random load goes on meeting new ones for hours. So that cache is capped; vLLM keeps a smaller one per layer, for
which a batch of every size runs first.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

import psutil

from vllm_evict.bench.model_facts import embedded_model, kv_bytes_per_token
from vllm_evict.bench.server_process import ServerProcess

PAGE_TOKENS = 32
POOL_PAGES = 160
BUDGET_TOKENS = 512
MAX_BATCH_TOKENS = 512
ENVIRONMENT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1"}
SAMPLE_SECONDS = 5
FIFTHS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder of the model (default: the embedded one)")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--policy", default="h2o", help="none: vLLM alone, to compare with")


def run(args: argparse.Namespace) -> int:
    model = args.model or str(embedded_model())
    kv_bytes = POOL_PAGES * kv_bytes_per_token(model, "bfloat16") * PAGE_TOKENS
    options = ["--enforce-eager", "--served-model-name", "bench", "--kv-cache-memory-bytes", str(kv_bytes)]
    options += ["--max-model-len", "2048", "--max-num-seqs", str(args.clients)]
    options += ["--max-num-batched-tokens", str(MAX_BATCH_TOKENS)]
    if args.policy != "none":
        options += ["--kv-eviction", args.policy, "--kv-eviction-budget", str(BUDGET_TOKENS)]
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(model, options, Path(folder) / "server.log", ENVIRONMENT)
        try:
            server.wait_ready()
            _warm_up(server.port)
            served, memory = _load(server, args.clients, args.minutes * 60)
        finally:
            server.stop()
    growths = []
    for (pid, name), samples in memory.items():
        if len(samples) >= 10:
            medians = _medians(samples)
            growths.append(medians[-1] / medians[1])
            in_mib = ", ".join(f"{median / 2**20:.1f}" for median in medians)
            print(f"{name:>24} {pid}: {in_mib} MiB in each fifth of the time, x{growths[-1]:.4f} after the first")
    print(f"{served} answers, some cut short by their clients")
    print(f"ratios: memory={max(growths):.4f}")
    return 0


def _warm_up(port: int) -> None:
    """One batch of every size, in tokens."""
    chance = random.Random(0)
    print(f"  warm-up: batches of 1 to {MAX_BATCH_TOKENS} tokens", file=sys.stderr)
    for num_tokens in chance.sample(range(1, MAX_BATCH_TOKENS + 1), MAX_BATCH_TOKENS):
        _stream(port, _random_tokens(chance, num_tokens), max_tokens=1, leave_after=10)


def _load(server: ServerProcess, num_clients: int, seconds: float) -> tuple[int, dict[tuple[int, str], list[int]]]:
    """Run the clients; count answers and sample memory."""
    end = time.monotonic() + seconds
    counts = [0] * num_clients

    def client(number: int) -> None:
        chance = random.Random(number)
        while time.monotonic() < end:
            counts[number] += _ask(server.port, chance)

    threads = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(num_clients)]
    for thread in threads:
        thread.start()
    memory: dict[tuple[int, str], list[int]] = defaultdict(list)
    while time.monotonic() < end:
        time.sleep(SAMPLE_SECONDS)
        for process in psutil.Process().children(recursive=True):
            memory[process.pid, process.name()].append(process.memory_info().rss)
        print(f"  {sum(counts)} answers, {end - time.monotonic():.0f} s left", file=sys.stderr)
    for thread in threads:
        thread.join(timeout=120)
    return sum(counts), memory


def _ask(port: int, chance: random.Random) -> int:
    """One streamed answer; the client may leave before its end."""
    length = chance.randrange(1000, 1500) if chance.random() < 0.1 else chance.randrange(5, 300)
    shared = [7 + i for i in range(100)] if chance.random() < 0.3 else []
    prompt = shared + _random_tokens(chance, length)
    _stream(port, prompt, max_tokens=chance.randrange(1, 300), leave_after=chance.randrange(1, 600))
    return 1


def _random_tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(100, 40_000) for _ in range(count)]


def _stream(port: int, prompt: list[int], max_tokens: int, leave_after: int) -> None:
    """Read an answer up to line `leave_after`, then hang up."""
    body = {"model": "bench", "prompt": prompt, "max_tokens": max_tokens, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {answer.read(500)!r}")
        while leave_after and answer.readline():
            leave_after -= 1
    finally:
        connection.close()


def _medians(samples: list[int]) -> list[float]:
    """Of each fifth of the time, of which the first is warm-up."""
    fifth = len(samples) // FIFTHS
    return [statistics.median(samples[i * fifth : (i + 1) * fifth]) for i in range(FIFTHS)]
