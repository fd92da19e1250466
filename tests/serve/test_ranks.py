"""Several processes behind one server, on a tiny model: tensor-parallel ranks, API servers, data-parallel engines."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError

import pytest
import torch

from tests.models.plant import HEAVY, NUM_NEUTRAL_TOKENS, plant
from tests.models.tiny import VOCAB_TOKENS, tiny
from tests.oracle.trace import read_rebases, read_trace
from tests.serve.server import Server

pytestmark = pytest.mark.serve

P = 32  # tokens in a page
# The first ends below the budget of four pages, the others evict in prefill and while they answer.
LENGTHS = (P, 3 * P + 5, 7 * P, 12 * P + 5)
NEW_TOKENS = 3 * P


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny(tmp_path_factory.mktemp("tiny"))


@contextmanager
def serving(model: Path, folder: Path, policy: str, *options: str, **environment: str) -> Iterator[Server]:
    trace = folder / "trace.jsonl"

    def command(port: int) -> list[str]:
        program = str(Path(sys.executable).with_name("vllm"))
        eviction = ["--kv-eviction", policy, "--kv-eviction-budget", str(4 * P), "--kv-eviction-trace", str(trace)]
        sizes = ["--max-model-len", "1024", "--max-num-batched-tokens", str(2 * P), "--kv-cache-memory-bytes", "16M"]
        # In fp32 rounding does not change a greedy token of this model, whatever the order of the sums.
        sizes += ["--dtype", "float32"]
        network = ["--host", "127.0.0.1", "--port", str(port)]
        return [
            *(program, "serve", str(model), "--served-model-name", "tiny", "--skip-tokenizer-init", "--enforce-eager"),
            *(*network, *eviction, *sizes, *options),
        ]

    server = Server(command, folder, model="tiny", trace=trace, environment={"OMP_NUM_THREADS": "1"} | environment)
    try:
        yield server.wait_ready()
    finally:
        server.stop()


def answers(server: Server, **request) -> dict[int, tuple[list[int], list[tuple[int, tuple[int, ...]]]]]:
    """By prompt length: the tokens, and when which pages went."""
    found = {}
    for length in LENGTHS:
        prompt = torch.randint(0, VOCAB_TOKENS, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        answer = server.complete(
            prompt, NEW_TOKENS, extra_body={"ignore_eos": True, "return_token_ids": True}, **request
        )
        tokens = answer.choices[0].token_ids
        assert len(tokens) == NEW_TOKENS and answer.usage.prompt_tokens == length
        lines = [line for lines in server.trace(answer).values() for line in lines]
        found[length] = tokens, [(line.num_computed_tokens, line.pages) for line in lines]
    return found


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory):
    """`alone(policy)`: what one rank answers."""
    known = {}

    def get(policy: str):
        if policy not in known:
            with serving(model, tmp_path_factory.mktemp(policy), policy) as server:
                known[policy] = answers(server)
        return known[policy]

    return get


TWO_RANKS = ("--tensor-parallel-size", "2")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["streaming", "h2o", "h2o-keydiff"])
def test_two_tensor_parallel_ranks_decide_as_one(model, alone, tmp_path, policy):
    with serving(model, tmp_path, policy, *TWO_RANKS, VLLM_CPU_OMP_THREADS_BIND="0|1") as server:
        assert "world_size=2 rank=1" in server.log
        found = answers(server)
    assert found == alone(policy)
    assert [bool(lines) for _, lines in found.values()] == [False, True, True, True]


@pytest.mark.slow
def test_two_tensor_parallel_ranks_move_the_same_pages(tmp_path):
    """Each turns the keys of its own heads; a model of eight pages, which two of the requests pass."""
    model = tiny(tmp_path / "short", max_positions=8 * P)
    found = {}
    for name, options in (("one", ()), ("two", TWO_RANKS)):
        folder = tmp_path / name
        folder.mkdir()
        environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if options else {}
        with serving(model, folder, "h2o", "--kv-eviction-positions", "rebase", *options, **environment) as server:
            found[name] = answers(server)
        rebases = read_rebases(folder / "trace.jsonl")
        assert len(rebases) == 2 and all(len(moved) >= 1 for moved in rebases.values())
    assert found["one"] == found["two"]


@pytest.mark.parametrize("kv_head", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_heavy_hitter_that_one_rank_sees(tmp_path, kv_head):
    """KV head 1 lives on rank 1, which tells nobody but through the sum over ranks."""
    heavy_page, num_tokens = 2, 9 * P
    prompt = torch.randint(0, NUM_NEUTRAL_TOKENS, (num_tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    prompt[heavy_page * P + 11] = HEAVY
    model = plant(tmp_path / "plant", kv_heads=(kv_head,))
    with serving(model, tmp_path, "h2o", *TWO_RANKS, VLLM_CPU_OMP_THREADS_BIND="0|1") as server:
        answer = server.complete(prompt, P, extra_body={"ignore_eos": True})
        ((_, lines),) = server.trace(answer).items()
    assert lines and not any(heavy_page in line.pages for line in lines)
    assert all(heavy_page in line.resident for line in lines if line.num_computed_tokens > (heavy_page + 1) * P)


@pytest.mark.slow
def test_two_api_servers(model, alone, tmp_path):
    """The flag is known in both, the one engine evicts, and its metrics are whole whichever of them is asked."""
    with serving(model, tmp_path, "h2o", "--api-server-count", "2") as server:
        (line,) = [line for line in server.log.splitlines() if "KV eviction h2o" in line]
        assert "budget 128 tokens = 4 pages" in line
        assert answers(server) == alone("h2o")
        for length in range(8):  # each over a connection of its own, so that both have their share
            prompt = list(range(8 * P, 14 * P + length))
            server.post("/v1/completions", {"model": "tiny", "prompt": prompt, "max_tokens": P, "ignore_eos": True})
            with pytest.raises(HTTPError, match="400"):
                too_little = {"kv_eviction_budget": 1}
                server.post("/v1/completions", {"model": "tiny", "prompt": prompt, "vllm_xargs": too_little})
            body = {"prompt": prompt, "max_tokens": 1, "stream_options": {"include_usage": True}}
            with server.event_stream("/v1/completions", body) as stream:
                assert b'"kv_eviction"' in stream.read()
        server.wait_idle(30)
        assert server.metric("vllm:kv_eviction_refused_requests_total") == 8
        lines = [line for lines in read_trace(tmp_path / "trace.jsonl").values() for line in lines]
        assert len({line.request for line in lines}) > 3 + 8
        for _ in range(8):
            assert server.metric("vllm:kv_eviction_evicted_pages_total") == sum(len(line.pages) for line in lines)
            assert server.metric("vllm:kv_eviction_evicted_mass_share_count") == len(lines)
            assert server.metric("vllm:kv_eviction_resident_tokens") == 0
            assert server.metric("vllm:kv_eviction_logical_tokens") == 0


@pytest.mark.slow
def test_two_data_parallel_engines(model, alone, tmp_path):
    """Each engine evicts for its own requests, with the other at work beside it."""
    with serving(model, tmp_path, "h2o", "--data-parallel-size", "2") as server:
        lines = [line for line in server.log.splitlines() if "KV eviction h2o" in line]
        assert len(lines) == 2
        with ThreadPoolExecutor() as clients:
            ranks = [{"X-data-parallel-rank": str(rank)} for rank in range(2)]
            both = list(clients.map(lambda headers: answers(server, extra_headers=headers), ranks))
        assert both == [alone("h2o")] * 2
        counts = re.findall(
            r"^vllm:kv_eviction_evicted_pages_total(\{.*\}) (\S+)$", server.get("/metrics"), re.MULTILINE
        )
        engines = {re.search(r'engine="(\d+)"', labels)[1] for labels, count in counts if float(count)}
        assert engines == {"0", "1"}
