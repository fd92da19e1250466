"""A real `vllm serve` process: started, waited for, asked over HTTP, ended by its own pid."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import openai

from tests.oracle.trace import TraceLine, read_trace

# Far more than a quiet machine takes (half a minute): other programs may hold its cores.
START_SECONDS = 400
ANSWER_SECONDS = 300
STOP_SECONDS = 30

# No binding: bound threads wait for cores that others hold while free ones idle.
THREADS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": str(min(len(os.sched_getaffinity(0)), 4)),
    "OMP_WAIT_POLICY": "PASSIVE",
}

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Server:
    """One server. Constructing starts it; `wait_ready` before asking; `stop` when done.

    Args:
        command: makes the command line for a port.
        folder: for the log.
        model: the name it serves.
        environment: variables to set beside this process's own; None removes one.
        trace: the file given to `--kv-eviction-trace`, if any.

    """

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        folder: Path,
        *,
        model: str,
        environment: Mapping[str, str | None] | None = None,
        trace: Path | None = None,
    ) -> None:
        self.model = model
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_file = folder / "server.log"
        self._trace_file = trace
        self._started = time.monotonic()
        self.process = start(command(self.port), self.log_file, THREADS | dict(environment or {}))

    def wait_ready(self) -> Server:
        """Block until it answers.

        Raises:
            RuntimeError: it ended, or takes too long.

        """
        while time.monotonic() - self._started < START_SECONDS:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with status {self.process.returncode}:\n{self.log}")
            try:
                self.get("/health")
            except OSError:  # refused while it loads
                time.sleep(0.2)
            else:
                return self
        raise RuntimeError(f"the server is not ready after {START_SECONDS} s:\n{self.log}")

    def stop(self) -> None:
        end(self.process)

    # ---- asking ----

    @cached_property
    def client(self) -> openai.OpenAI:
        """Stock client without retries: a failed request is a failed test."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=ANSWER_SECONDS)

    def complete(self, prompt: str | list[int], max_tokens: int, *, cached: bool = False, **options: Any):
        """A completion, greedy unless `options` say otherwise.

        Equal requests give equal bits only if they run alike: unless `cached`, the prompt is computed anew, because
        after a prefix hit fewer rows are multiplied at once, and bf16 rounds differently.
        """
        extra = options.pop("extra_body", {}) | ({} if cached else {"cache_salt": uuid.uuid4().hex})
        return self.client.completions.create(
            model=self.model, prompt=prompt, max_tokens=max_tokens, extra_body=extra, **{"temperature": 0, **options}
        )

    def chat(self, messages: str | list[dict], max_tokens: int, *, cached: bool = False, **options: Any):
        """A chat completion, greedy unless `options` say otherwise; `cached` as in `complete`."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        extra = options.pop("extra_body", {}) | ({} if cached else {"cache_salt": uuid.uuid4().hex})
        return self.client.chat.completions.create(
            model=self.model,
            messages=messages,
            max_tokens=max_tokens,
            extra_body=extra,
            **{"temperature": 0, **options},
        )

    def tokenize(self, **request: Any) -> list[int]:
        """Tokens of `prompt="..."` or of `messages=[...]` in the chat template."""
        return json.loads(self.post("/tokenize", {"model": self.model, **request}))["tokens"]

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return answer.read().decode()

    def post(self, path: str, body: dict) -> str:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            return answer.read().decode()

    @contextlib.contextmanager
    def event_stream(self, path: str, body: dict) -> Iterator[http.client.HTTPResponse]:
        """The raw answer to a streamed request; leaving the block closes the connection, as a client that goes away."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_SECONDS)
        body = {"model": self.model, "stream": True, "temperature": 0, "cache_salt": uuid.uuid4().hex, **body}
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            yield connection.getresponse()
        finally:
            connection.close()

    # ---- looking ----

    @property
    def log(self) -> str:
        """Everything it has written so far."""
        return self.log_file.read_text(errors="replace")

    def trace(self, answer) -> dict[str, list[TraceLine]]:
        """The evictions of the request behind `answer`, by engine request (several if n > 1)."""
        if self._trace_file is None or not self._trace_file.exists():
            return {}
        return {name: lines for name, lines in read_trace(self._trace_file).items() if answer.id in name}

    def metric(self, name: str) -> float:
        """Value of a metric, summed over its labels."""
        values = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", self.get("/metrics"), re.MULTILINE)
        assert values, f"/metrics has no {name}"
        return sum(map(float, values))

    @cached_property
    def cache_config(self) -> dict[str, str]:
        """Labels of vLLM's `cache_config_info`: block size, number of pages and so on."""
        (labels,) = re.findall(r"^vllm:cache_config_info\{(.*)\} ", self.get("/metrics"), re.MULTILINE)
        return dict(re.findall(r'(\w+)="(.*?)"', labels))

    @property
    def usable_pages(self) -> int:
        """Pages of the pool without vLLM's null page."""
        return int(self.cache_config["num_gpu_blocks"]) - 1

    def load(self) -> tuple[float, float, float]:
        """Requests running, requests waiting, share of the pages in use."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        running, waiting, usage = (self.metric(name) for name in names)
        return running, waiting, usage

    def wait_idle(self, seconds: float) -> None:
        """Fail unless it holds no request and no page soon."""
        end_time = time.monotonic() + seconds
        while self.load() != (0, 0, 0):
            assert time.monotonic() < end_time, f"running, waiting, usage still {self.load()} after {seconds} s"
            time.sleep(0.1)


class PagesInUse:
    """Pages of the pool in use, sampled from /metrics while the block runs; `peak` is the most seen."""

    def __init__(self, server: Server) -> None:
        self.samples: list[float] = []
        self._server = server
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._done.wait(0.05):
            self.samples.append(self._server.metric("vllm:kv_cache_usage_perc") * self._server.usable_pages)

    @property
    def peak(self) -> float:
        return max(self.samples)

    def __enter__(self) -> PagesInUse:
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._done.set()
        self._thread.join()


def start(command: Sequence[str], log_file: Path, environment: Mapping[str, str | None]) -> subprocess.Popen:
    """Start `command` in a session of its own, so that it can be ended with its children and nobody else.

    It also ends with us, should nobody be left to end it.
    """
    variables = {**os.environ, **environment}
    with log_file.open("w") as log:
        return subprocess.Popen(
            command,
            env={name: value for name, value in variables.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )


def _end_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def end(process: subprocess.Popen) -> None:
    """End a process made by `start`, and its children."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # whoever is left of its session
    process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
