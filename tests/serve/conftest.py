"""Two servers for all tests here, on the real model: one that evicts, and plain vLLM to compare with."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.command_line import CommandLines
from tests.serve.server import Server
from vllm_evict.embedded_model import MODEL_NAME, embedded_model_path

# A page of 32 tokens: 30 layers, K and V, 3 KV heads of size 64, bf16.
PAGE_BYTES = 30 * 2 * 32 * 3 * 64 * 2
BUDGET_TOKENS = 1024
CHUNK_TOKENS = 512
MAX_TOKENS = 6144
# Four requests of 29 pages fit, and cannot grow to their budget of 32.
EVICTION_PAGES = 123
# Plain vLLM must hold one request of MAX_TOKENS.
PLAIN_PAGES = 201

SHARED_OPTIONS = [
    *("--max-model-len", str(MAX_TOKENS), "--max-num-seqs", "8", "--max-num-batched-tokens", str(CHUNK_TOKENS)),
    # Usage tells how much of a prompt came from the prefix cache.
    "--enable-prompt-tokens-details",
]


def eviction_server(folder: Path) -> Server:
    """Started as a user would: `vllm-evict serve`."""
    trace = folder / "trace.jsonl"
    options = [*SHARED_OPTIONS, "--kv-cache-memory-bytes", str(EVICTION_PAGES * PAGE_BYTES)]
    options += ["--kv-eviction-trace", str(trace)]

    def command(port: int) -> list[str]:
        program = str(Path(sys.executable).with_name("vllm-evict"))
        return [program, "serve", "--budget", str(BUDGET_TOKENS), "--port", str(port), "--", *options]

    return Server(command, folder, model=MODEL_NAME, trace=trace)


def plain_server(folder: Path) -> Server:
    """vLLM as if the plugin were not installed, with the same page size, so that the same kernels round alike."""
    options = [*SHARED_OPTIONS, "--kv-cache-memory-bytes", str(PLAIN_PAGES * PAGE_BYTES), "--block-size", "32"]

    def command(port: int) -> list[str]:
        program = str(Path(sys.executable).with_name("vllm"))
        model = [str(embedded_model_path()), "--served-model-name", MODEL_NAME]
        return [program, "serve", *model, "--host", "127.0.0.1", "--port", str(port), "--enforce-eager", *options]

    return Server(command, folder, model=MODEL_NAME, environment={"VLLM_PLUGINS": ""})


_SERVERS = {"server": eviction_server, "plain": plain_server}


@pytest.fixture(scope="package")
def starting(request, tmp_path_factory) -> Iterator[dict[str, Server]]:
    """The servers that tests of this session ask for, on their way up: they start while command lines are tested."""
    wanted = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    servers: dict[str, Server] = {}
    try:
        for name, make in _SERVERS.items():
            if name in wanted:
                servers[name] = make(tmp_path_factory.mktemp(name))
        yield servers
    finally:
        for server in servers.values():
            server.stop()


@pytest.fixture(scope="package")
def server(starting) -> Server:
    """h2o, budget 1024, chunks of 512, a pool that eight long requests overfill."""
    return starting["server"].wait_ready()


@pytest.fixture(scope="package")
def plain(starting) -> Server:
    """vLLM without the plugin."""
    return starting["plain"].wait_ready()


@pytest.fixture(scope="package")
def text_tokens(server) -> list[int]:
    """About 15,000 tokens of English, the tests' raw material."""
    from vllm_evict.bench.text import real_text

    return server.tokenize(prompt=real_text()[:60_000], add_special_tokens=False)


@pytest.fixture(scope="session")
def command_lines() -> Iterator[CommandLines]:
    with CommandLines() as child:
        yield child


# ---- the log of a server goes into the report of a failed test ----

_log_sizes = pytest.StashKey[dict[str, int]]()


def _servers_of(item: pytest.Item) -> dict[str, Server]:
    return {
        name: value for name, value in getattr(item, "funcargs", {}).items() if isinstance(value, Server) and value.log
    }


@pytest.fixture(autouse=True)
def _mark_logs(request) -> None:
    request.node.stash[_log_sizes] = {name: len(server.log) for name, server in _servers_of(request.node).items()}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call):
    report = yield
    if report.failed:
        before = item.stash.get(_log_sizes, {})
        for name, server in _servers_of(item).items():
            report.sections.append((f"log of {name!r} during this test", server.log[before.get(name, 0) :]))
    return report
