"""Command lines that must be refused before weights load, each with one clear last line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.conftest import PAGE_BYTES
from tests.serve.server import START_SECONDS, THREADS, end, start
from vllm_evict.config import MAX_TOKENS, POLICY_NAMES, EvictionConfig
from vllm_evict.embedded_model import embedded_model_path

pytestmark = [pytest.mark.serve, pytest.mark.usefixtures("starting")]

H2O = ("--kv-eviction", "h2o")
WHOLE_NUMBER = f"whole number of tokens from 0 to {MAX_TOKENS}"
DROP = "drop --kv-eviction"


def settings(**values) -> tuple[str, str]:
    return "--kv-eviction-config", json.dumps(values)


def in_additional_config(**values) -> tuple[str, str]:
    return "--additional-config", json.dumps({"kv_eviction": values})


# name: (arguments, what the last line must say: the flag, the value, what is allowed or the way out)
BAD = {
    "unknown-policy": (["--kv-eviction", "lru"], ["--kv-eviction", "'lru'", *POLICY_NAMES]),
    "unknown-policy-json": ([*settings(policy="lru")], ["--kv-eviction", "'lru'", *POLICY_NAMES]),
    # ---- not a number of tokens ----
    "budget-64k": ([*H2O, "--kv-eviction-budget", "64k"], ["--kv-eviction-budget", "'64k'", WHOLE_NUMBER]),
    "budget-negative": ([*H2O, "--kv-eviction-budget=-1"], ["--kv-eviction-budget", "-1", WHOLE_NUMBER]),
    "budget-fraction": ([*H2O, "--kv-eviction-budget", "1.5"], ["--kv-eviction-budget", "1.5", WHOLE_NUMBER]),
    "budget-empty": ([*H2O, "--kv-eviction-budget", ""], ["--kv-eviction-budget", "''", WHOLE_NUMBER]),
    "budget-2**31": ([*H2O, f"--kv-eviction-budget={2**31}"], ["--kv-eviction-budget", str(2**31), WHOLE_NUMBER]),
    "budget-2**63": ([*H2O, f"--kv-eviction-budget={2**63}"], ["--kv-eviction-budget", str(2**63), WHOLE_NUMBER]),
    "json-string": ([*settings(policy="h2o", budget="64k")], ["--kv-eviction-budget", "'64k'", WHOLE_NUMBER]),
    "json-2**63": ([*settings(policy="h2o", budget=2**63)], ["--kv-eviction-budget", str(2**63), WHOLE_NUMBER]),
    # ---- too small: the number it takes ----
    "budget-0": ([*H2O, "--kv-eviction-budget", "0"], ["--kv-eviction-budget 0", "at least 64"]),
    "budget-below-minimum": ([*H2O, "--kv-eviction-budget", "32"], ["--kv-eviction-budget 32", "at least 64"]),
    "budget-below-minimum-of-larger-pages": (
        [*H2O, "--kv-eviction-budget", "128", "--block-size", "128"],
        ["--kv-eviction-budget 128", "at least 256"],
    ),
    "sink-and-recent-over-budget": (
        [*H2O, "--kv-eviction-budget", "256", "--kv-eviction-sink", "128", "--kv-eviction-recent", "160"],
        ["--kv-eviction-budget 256", "--kv-eviction-sink 128", "160", "at least 288"],
    ),
    # ---- not the settings' shape ----
    "unknown-field": ([*H2O, *settings(window=3)], ["'window'", *EvictionConfig.model_fields]),
    "unknown-field-in-additional-config": (
        [*in_additional_config(policy="h2o", window=3)],
        ["'window'", *EvictionConfig.model_fields],
    ),
    "not-json": (["--kv-eviction-config", "{policy: h2o"], ["--kv-eviction-config", "{policy: h2o", "not JSON"]),
    "trace-nowhere": ([*H2O, "--kv-eviction-trace", "/no/such/folder/t"], ["--kv-eviction-trace", "/no/such/folder/t"]),
    # ---- what does not go together ----
    "kv-connector": (
        [*H2O, "--kv-transfer-config", '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}'],
        ["--kv-eviction h2o", "--kv-transfer-config", DROP],
    ),
    "speculative-ngram": (
        [
            *H2O,
            "--speculative-config",
            '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 2}',
        ],
        ["--kv-eviction h2o", "--speculative-config", DROP],
    ),
    "fp8-cache": ([*H2O, "--kv-cache-dtype", "fp8"], ["--kv-eviction h2o", "--kv-cache-dtype auto", DROP]),
    "own-scheduler": (
        [*H2O, "--scheduler-cls", "vllm.v1.core.sched.scheduler.Scheduler"],
        ["--kv-eviction h2o", "--scheduler-cls", DROP],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(command_lines, name):
    arguments, said = BAD[name]
    outcome = command_lines.serve(str(embedded_model_path()), "--enforce-eager", *arguments)
    check_refusal(outcome.status, outcome.output, said)
    assert outcome.facts is None, "the engine would have been started"


def check_refusal(status: int, output: str, said: list[str]) -> None:
    last_line = output.strip().splitlines()[-1]
    assert status != 0
    assert re.match(r"vllm( serve)?: error: ", last_line), output
    assert "Traceback" not in output
    for fragment in said:
        assert fragment in last_line


def test_flag_without_the_plugin(command_lines):
    """Filtered out by the allow list, the flag is unknown: an error, not silently plain vLLM."""
    outcome = command_lines.serve(str(embedded_model_path()), *H2O, environment={"VLLM_PLUGINS": "other"})
    check_refusal(outcome.status, outcome.output, ["unrecognized arguments: --kv-eviction h2o"])


def test_untested_vllm(command_lines):
    model = str(embedded_model_path())
    outcome = command_lines.serve(model, *H2O, version="0.33.0rc1+cpu")
    check_refusal(outcome.status, outcome.output, ["vLLM 0.33.0rc1+cpu", "0.32", DROP])
    assert command_lines.serve(model, version="0.33.0rc1+cpu").status == 0  # nobody asked us
    assert command_lines.serve(model, *H2O, version="0.32.7+cpu").status == 0


# ---- through the real program ----


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Real processes that must end by themselves, all at once: `{name: (process, log file)}`."""
    vllm = str(Path(sys.executable).with_name("vllm"))
    model = str(embedded_model_path())
    one_page_short = (32 + 16 + 1) * PAGE_BYTES  # budget, a chunk, one page more; and the null page is missing
    options = ["--kv-eviction-budget", "1024", "--max-num-batched-tokens", "512", "--enforce-eager", "--port", "0"]
    commands = {
        "budget": ([vllm, "serve", model, *H2O, "--kv-eviction-budget", "32"], {}),
        "filtered": ([vllm, "serve", model, *H2O], {"VLLM_PLUGINS": "other"}),
        "pool": ([vllm, "serve", model, *H2O, *options, "--kv-cache-memory-bytes", str(one_page_short)], {}),
    }
    folder = tmp_path_factory.mktemp("programs")
    processes = {
        name: (start(command, folder / f"{name}.log", THREADS | environment), folder / f"{name}.log")
        for name, (command, environment) in commands.items()
    }
    yield processes
    for process, _ in processes.values():
        end(process)


def finished(program: tuple[subprocess.Popen, Path]) -> tuple[int, str]:
    process, log_file = program
    status = process.wait(START_SECONDS)
    return status, log_file.read_text()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("budget", ["--kv-eviction-budget 32", "at least 64"]),
        ("filtered", ["unrecognized arguments: --kv-eviction h2o"]),
    ],
)
def test_real_program_refuses(programs, name, said):
    status, log = finished(programs[name])
    check_refusal(status, log, said)
    assert "EngineCore" not in log and "Loading safetensors" not in log


def test_pool_one_page_short(programs):
    """The pool is known only once weights are loaded. The message says what it takes: 32 + 16 + 1 and the null page."""
    status, log = finished(programs["pool"])
    assert status != 0
    (message,) = set(re.findall(r"the KV cache has 48 usable pages.*?--max-num-batched-tokens\.", log))
    for fragment in ("may hold 49", f"50 pages (--kv-cache-memory-bytes {50 * PAGE_BYTES})", "--kv-eviction-budget"):
        assert fragment in message
