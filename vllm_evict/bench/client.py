"""vLLM's own benchmark client on one of our servers, with the server's metrics watched meanwhile.

The client runs in this process (it is `vllm bench serve` all the same): starting it anew for each run costs more
than many a run.
"""

from __future__ import annotations

import contextlib
import io
import re
import threading
import time
import urllib.request
from types import TracebackType
from typing import Any

from vllm_evict.bench.load import Measurement, Sample, Scenario

SAMPLE_SECONDS = 2.0
WARM_UP_REQUESTS = 4
WARM_UP_TOKENS = 16


def measure(url: str, scenario: Scenario, tokenizer: str, policy: str, round_number: int) -> Measurement:
    """One run. The prompts are random; `round_number` is their seed, so all policies get the same."""
    with Watch(url) as watch:
        result = _bench_serve(
            url, scenario, tokenizer, round_number, requests=scenario.requests, output_tokens=scenario.output_tokens
        )
    samples = watch.samples
    return Measurement(
        policy,
        round_number,
        output_tokens_per_second=result["output_throughput"],
        ms_per_output_token=result["mean_tpot_ms"],
        ms_to_first_token=result["mean_ttft_ms"],
        preemptions=samples[-1].preemptions,
        samples=tuple(samples),
    )


def warm_up(url: str, scenario: Scenario, tokenizer: str) -> None:
    """A few short answers to prompts of the scenario's length (and its shared prefix)."""
    _bench_serve(url, scenario, tokenizer, 0, requests=WARM_UP_REQUESTS, output_tokens=WARM_UP_TOKENS)


def _bench_serve(
    url: str, scenario: Scenario, tokenizer: str, seed: int, *, requests: int, output_tokens: int
) -> dict[str, Any]:
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    options = ["--backend", "openai", "--base-url", url, "--model", "bench", "--tokenizer", tokenizer]
    options += ["--dataset-name", "random", "--ignore-eos", "--temperature", "0", "--disable-tqdm"]
    options += ["--random-input-len", str(scenario.input_tokens - scenario.prefix_tokens)]
    options += ["--random-prefix-len", str(scenario.prefix_tokens), "--random-output-len", str(output_tokens)]
    options += ["--num-prompts", str(requests), "--max-concurrency", str(scenario.concurrency), "--seed", str(seed)]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        result = serve.main(parser.parse_args(options))
    if result["completed"] != requests or result["total_output_tokens"] != requests * output_tokens:
        raise RuntimeError(
            f"{result['completed']} of {requests} requests completed, with {result['total_output_tokens']} tokens:\n"
            + said.getvalue()[-2000:]
        )
    return result


class Watch:
    """Samples the server's metrics every `SAMPLE_SECONDS`, at the beginning and at the end, while in the block."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.samples: list[Sample] = []

    def __enter__(self) -> Watch:
        self._start = time.monotonic()
        self._preemptions_before = 0
        self._preemptions_before = self._sample().preemptions
        self.samples.append(self._sample())
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self.samples.append(self._sample())

    def _run(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            self.samples.append(self._sample())

    def _sample(self) -> Sample:
        with urllib.request.urlopen(self._url + "/metrics", timeout=60) as response:
            text = response.read().decode()
        return Sample(
            seconds=round(time.monotonic() - self._start, 2),
            running=int(metric(text, "vllm:num_requests_running")),
            waiting=int(metric(text, "vllm:num_requests_waiting")),
            preemptions=int(metric(text, "vllm:num_preemptions_total")) - self._preemptions_before,
            pool_usage=round(metric(text, "vllm:kv_cache_usage_perc"), 4),
        )


def metric(text: str, name: str) -> float:
    """Sum over labels of the metric `name` in Prometheus's text format.

    Raises:
        ValueError: there is none.

    """
    values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    if not values:
        raise ValueError(f"the server has no metric {name}")
    return sum(map(float, values))
