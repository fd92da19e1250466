"""Serve the embedded model with a small budget and watch pages go (`make demo`).

Sends a prompt several times longer than the budget and a short chat through the `openai` client,
prints the answers and what happened to the pages, and stops the server it started.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import openai

from vllm_evict.embedded_model import MODEL_NAME
from vllm_evict.launch import serve_command, serve_environment

BUDGET_TOKENS = 512
START_TIMEOUT_SECONDS = 300
STOP_TIMEOUT_SECONDS = 30
# A prompt is read in chunks, and a chunk sees all it may before it shrinks to the budget; chunks of
# the budget's own length keep the peak at about twice the budget.
CHUNK_TOKENS = BUDGET_TOKENS
# About 2,300 tokens of public text that lies at hand.
LONG_TEXT = Path(__file__).parents[1] / "LICENSE"
LONG_QUESTION = "In one sentence: what is the document above?"
SHORT_QUESTION = "What is the capital of France?"


def main() -> int:
    # As for Ctrl-C: leave through the `finally` below.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="vllm-evict-demo-") as folder:
        trace, log = Path(folder) / "trace.jsonl", Path(folder) / "server.log"
        port = free_port()
        server = start_server(port, trace, log)
        try:
            wait_until_ready(server, port)
            talk(f"http://127.0.0.1:{port}", trace)
        except KeyboardInterrupt:
            say("\ninterrupted")
            return 130
        except Exception:
            # All of it: vLLM's root cause stands far above its last lines.
            say(f"--- the server's log ---\n{log.read_text(errors='replace')}------")
            raise
        finally:
            stop_server(server)
    return 0


def talk(url: str, trace: Path) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    cache = cache_config(url)
    page_tokens, pool_pages = int(cache["block_size"]), int(cache["num_gpu_blocks"])
    budget_pages = -(-BUDGET_TOKENS // page_tokens)

    text = LONG_TEXT.read_text()
    say(f"\n1. A long prompt: {LONG_TEXT.name}, then {LONG_QUESTION!r}")
    with PeakPages(url, pool_pages) as peak:
        answer = client.chat.completions.create(
            model=MODEL_NAME,
            messages=[{"role": "user", "content": f"{text}\n\n{LONG_QUESTION}"}],
            max_tokens=64,
            temperature=0,
        )
    say(f"   answer: {answer.choices[0].message.content.strip()}")
    tokens = answer.usage.total_tokens
    pages = -(-tokens // page_tokens)
    evicted = sum(len(line["pages"]) for line in read_trace(trace))
    say(f"   {tokens} tokens fill {pages} pages of {page_tokens}; the budget is {budget_pages} pages")
    say(f"   evicted while it ran, and given back to the pool at once: {evicted} pages")
    say(f"   held at the end: {pages - evicted} pages; at most at any time seen: {peak.pages} pages")

    say(f"\n2. A short chat, streamed: {SHORT_QUESTION!r}")
    sys.stdout.write("   answer: ")
    for part in client.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": SHORT_QUESTION}],
        max_tokens=64,
        temperature=0,
        stream=True,
    ):
        if part.choices:
            sys.stdout.write(part.choices[0].delta.content or "")
            sys.stdout.flush()
    more = sum(len(line["pages"]) for line in read_trace(trace)) - evicted
    say(f"\n   evicted: {more} pages (it never reached the budget)")

    say(
        f"\nBoth requests are done: {used_pages(url, pool_pages)} of the pool's {pool_pages} pages"
        f" are held, {evicted + more} were evicted, all were given back."
    )


class PeakPages:
    """The most pages of the pool in use at once, seen through /metrics while the block runs."""

    def __init__(self, url: str, pool_pages: int):
        self.pages = 0
        self._url, self._pool_pages = url, pool_pages
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            self.pages = max(self.pages, used_pages(self._url, self._pool_pages))

    def __enter__(self) -> "PeakPages":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()


def metric(url: str, name: str) -> tuple[dict[str, str], float]:
    """Labels and value of the metric `name`."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    match = re.search(rf"^{re.escape(name)}\{{(.*)\}} (\S+)$", text, re.MULTILINE)
    if match is None:
        raise RuntimeError(f"the server's /metrics has no {name}")
    return dict(re.findall(r'(\w+)="(.*?)"', match[1])), float(match[2])


def cache_config(url: str) -> dict[str, str]:
    return metric(url, "vllm:cache_config_info")[0]


def used_pages(url: str, pool_pages: int) -> int:
    return round(metric(url, "vllm:kv_cache_usage_perc")[1] * (pool_pages - 1))  # one is vLLM's null


def read_trace(trace: Path) -> list[dict]:
    """The evictions so far; vLLM makes the file with the first one."""
    return [json.loads(line) for line in trace.read_text().splitlines()] if trace.exists() else []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_server(port: int, trace: Path, log: Path) -> subprocess.Popen:
    options = ["--kv-eviction-trace", str(trace), "--max-num-batched-tokens", str(CHUNK_TOKENS)]
    options += sys.argv[1:]
    command = serve_command(budget_tokens=BUDGET_TOKENS, port=port, extra=options)
    say(f"starting the server (about half a minute): {' '.join(command)}")
    with log.open("w") as file:
        return subprocess.Popen(
            command,
            env=os.environ | serve_environment(extra=options),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            # Its own session: Ctrl-C reaches this program only, which then stops the server.
            start_new_session=True,
        )


def wait_until_ready(server: subprocess.Popen, port: int) -> None:
    started = time.monotonic()
    while time.monotonic() - started < START_TIMEOUT_SECONDS:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with status {server.returncode}")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
        except OSError:  # refused while it loads
            time.sleep(0.5)
        else:
            say(f"ready after {time.monotonic() - started:.0f} s")
            return
    raise RuntimeError(f"the server is not ready after {START_TIMEOUT_SECONDS} s")


def stop_server(server: subprocess.Popen) -> None:
    """Stop the process started here, and only that one; it takes its workers along."""
    if server.poll() is None:
        server.terminate()
        try:
            server.wait(STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)  # its session: itself and the workers it started
            server.wait()
    say("the server is stopped")


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
