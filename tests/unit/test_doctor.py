"""`vllm-evict doctor` and `vllm-evict policies`: what they say, and the exit status."""

import importlib.metadata
import json
import logging
import os
import subprocess
import sys

import pytest

from vllm_evict import cli, doctor
from vllm_evict.policies import POLICIES


class EntryPoint:
    name, value = doctor.NAME, "somewhere:register"

    def __init__(self, error=None):
        self.error = error

    def load(self):
        if self.error:
            raise self.error
        return lambda: None


@pytest.fixture
def healthy(monkeypatch):
    """An environment without faults, with nothing of vLLM imported."""
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [EntryPoint()])
    monkeypatch.setattr(doctor, "_checkup", lambda model, extra: [("checkup", True, f"{model} {extra}")])


def report(capsys, *argv):
    status = cli.main(["doctor", "--json", *argv])
    said = json.loads(capsys.readouterr().out)
    assert said["well"] == (status == 0)
    return status, {finding["name"]: finding for finding in said["findings"]}


def test_all_well(healthy, capsys):
    status, found = report(capsys, "some/model", "--", "--max-num-seqs", "4")
    assert status == 0
    assert found["vllm"]["detail"] == importlib.metadata.version("vllm")
    assert found["checkup"]["detail"] == "some/model ['--max-num-seqs', '4']"


def test_text(healthy, capsys):
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "ok   VLLM_PLUGINS       is not set: all plugins load" in lines
    assert lines[-1].split(maxsplit=2) == ["ok", "checkup", "None []"]


@pytest.mark.parametrize(("value", "good"), [("kv_eviction", True), ("a,kv_eviction", True), ("a", False), ("", False)])
def test_vllm_plugins_may_filter_it_out(healthy, monkeypatch, capsys, value, good):
    monkeypatch.setenv("VLLM_PLUGINS", value)
    status, found = report(capsys)
    assert (status, found["VLLM_PLUGINS"]["good"]) == (0 if good else 1, good)
    assert repr(value) in found["VLLM_PLUGINS"]["detail"]
    assert ("checkup" in found) == good  # nothing further is said about an environment that is broken


def test_entry_point_missing(healthy, monkeypatch, capsys):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    status, found = report(capsys)
    assert status == 1 and "install vllm-evict" in found["entry point"]["detail"]


def test_plugin_that_does_not_load(healthy, monkeypatch, capsys):
    """vLLM only logs it and goes on without the flags."""
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [EntryPoint(ImportError("no numba"))])
    status, found = report(capsys)
    assert status == 1 and found["plugin"]["detail"] == "does not load: ImportError: no numba"


def test_vllm_missing(healthy, monkeypatch, capsys):
    version = importlib.metadata.version

    def without_vllm(name):
        if name == "vllm":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_vllm)
    status, found = report(capsys)
    assert status == 1 and found["vllm"]["good"] is False


@pytest.mark.parametrize(("level", "heard"), [(None, ["ERROR"]), ("INFO", ["INFO", "WARNING", "ERROR"])])
def test_the_log_is_out_of_the_way_and_afterwards_as_it_was(healthy, monkeypatch, level, heard):
    """Unless a level was asked for. Whoever uses vLLM next in this process finds its log as it was."""
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    if level:
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", level)
    logger, records = logging.getLogger("vllm.some.module"), []
    handler = logging.Handler()
    handler.emit = records.append
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)

    def noisy_checkup(*_):
        for name in ("INFO", "WARNING", "ERROR"):
            logger.log(getattr(logging, name), "%s line", name)
        return []

    monkeypatch.setattr(doctor, "_checkup", noisy_checkup)
    before = os.environ.copy(), logging.getLogger("vllm").level, logging.root.manager.disable
    assert cli.main(["doctor"]) == 0
    logger.removeHandler(handler)
    assert [record.levelname for record in records] == heard
    assert (os.environ.copy(), logging.getLogger("vllm").level, logging.root.manager.disable) == before


def test_options_without_a_model(capsys):
    assert cli.main(["doctor", "--", "--kv-eviction", "h2o"]) == 2
    assert "name a MODEL" in capsys.readouterr().err


# ---- with the real vLLM: one process, several models and flags ----

CASES = {
    "default": [],
    "off": ["--kv-eviction", "none"],
    "streaming": ["--kv-eviction", "streaming", "--kv-eviction-budget", "96", "--block-size", "64"],
    "many faults": [
        "--kv-eviction",
        "h2o",
        "--kv-cache-dtype",
        "fp8",
        "--kv-sharing-fast-prefill",
        "--kv-eviction-sink",
        "9000",
    ],
    "no policy": ["--kv-eviction-budget", "1024"],
    "unknown flag": ["--no-such-flag"],
    "wrong value": ["--kv-eviction", "best"],
    "vllm refuses": ["--max-model-len", "999999"],
}

REAL = """
import contextlib, io, json, sys
from vllm_evict import cli

def doctor(*argv):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = cli.main(["doctor", "--json", *argv])
    return [status, json.loads(out.getvalue())["findings"]]

model, cases = sys.argv[1], json.loads(sys.argv[2])
results = {name: doctor(model, "--", *options) for name, options in cases.items()}
results["machine"] = doctor()
results["no such model"] = doctor("/no/such/model")
print("RESULT " + json.dumps(results))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    }
    (folder / "config.json").write_text(json.dumps(config))
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
    done = subprocess.run(
        [sys.executable, "-c", REAL, folder, json.dumps(CASES)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def faults(result):
    return [finding["detail"] for finding in result[1] if finding["good"] is False]


def detail(result, name):
    return next(finding["detail"] for finding in result[1] if finding["name"] == name)


def test_this_machine(results):
    status, _ = results["machine"]
    assert status == 0
    assert detail(results["machine"], "runner").startswith("V1 model runner, synchronous scheduling")


def test_what_would_start(results):
    assert [results[case][0] for case in ("default", "off", "streaming")] == [0, 0, 0]
    assert detail(results["default"], "eviction").startswith("--kv-eviction h2o would start; pages of 32 tokens")
    assert detail(results["off"], "eviction").startswith("--kv-eviction none")
    assert detail(results["streaming"], "eviction").startswith("--kv-eviction streaming would start; pages of 64")
    assert detail(results["default"], "attention backend").startswith("CPU_ATTN (vllm.")


def test_every_fault_is_named_at_once(results):
    """The server would stop at the first."""
    status, _ = results["many faults"]
    named = faults(results["many faults"])
    assert status == 1 and len(named) == 3
    for words, fault in zip(("quantised KV cache", "fast prefill", "--kv-eviction-budget 2048"), named, strict=True):
        assert words in fault


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no policy", "--kv-eviction-budget without --kv-eviction"),
        ("unknown flag", "unrecognized arguments: --no-such-flag"),
        ("wrong value", "invalid choice: 'best'"),
        ("vllm refuses", "max_model_len"),
        ("no such model", "/no/such/model"),
    ],
)
def test_what_the_server_would_refuse_at_once(results, case, words):
    status, _ = results[case]
    [fault] = faults(results[case])
    assert status == 1 and fault.startswith("would refuse ") and words in fault


# ---- policies ----


def test_policies_have_a_line_each(capsys):
    assert cli.main(["policies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(POLICIES)
    assert all(len(line.split()) > 4 and line.endswith(".") for line in lines)
    assert {line.split()[0]: line.partition("Measures ")[2] for line in lines if "Measures" in line} == {
        "h2o": "attention.",
        "keydiff": "keys.",
        "h2o-keydiff": "attention and keys.",
    }
