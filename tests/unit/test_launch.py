"""The command line of `make serve`, and the `vllm-evict` command."""

import argparse
import os

import pytest

from vllm_evict import __version__, cli, launch


def command(**kwargs):
    return launch.serve_command(model="some/model", **{"cpu": True, **kwargs})[1:]


@pytest.fixture(autouse=True)
def no_settings_of_the_machine(monkeypatch):
    for name in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)


def test_command_on_cpu():
    assert command(policy="streaming", budget_tokens=1024, port=8001) == [
        "serve",
        "some/model",
        *("--host", "127.0.0.1", "--port", "8001"),
        *("--kv-eviction", "streaming", "--kv-eviction-budget", "1024"),
        *("--enforce-eager", "--kv-cache-memory-bytes", "2G"),
    ]


@pytest.mark.parametrize(("text", "budget"), [("64", 64), ("unlimited", "unlimited")])
def test_budgets(text, budget):
    assert launch._budget(text) == budget
    assert command(budget_tokens=budget)[8:10] == ["--kv-eviction-budget", text]


@pytest.mark.parametrize("text", ["lots", "-5", "", "1.5"])
def test_budgets_that_are_none(text):
    with pytest.raises(argparse.ArgumentTypeError, match="give a number of tokens, or unlimited"):
        launch._budget(text)


def test_command_on_gpu_leaves_the_defaults_to_vllm():
    assert command(cpu=False)[-2:] == ["--kv-eviction", "h2o"]


def test_options_of_the_caller_come_last_and_so_win():
    assert command(extra=["--kv-cache-memory-bytes", "8G"])[-4:] == [
        *("--kv-cache-memory-bytes", "2G"),
        *("--kv-cache-memory-bytes", "8G"),
    ]


def test_variable_for_the_cache_size_is_not_contradicted(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    assert "--kv-cache-memory-bytes" not in command()


def test_model_is_the_embedded_one_unless_named(monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "embedded_model_path", lambda: tmp_path)
    assert launch.serve_command(cpu=True)[2:5] == [str(tmp_path), "--served-model-name", "smollm2-135m-instruct"]


@pytest.mark.parametrize(
    ("cpus", "extra", "bound"),
    [
        ({0, 1}, [], "0,1"),
        ({5, 2, 7}, ["--max-num-seqs", "4"], "2,5,7"),  # only those this process may use
        (set(range(8)), [], "0,1,2,3,4,5,6,7"),
        (set(range(9)), [], None),  # vLLM knows more about large machines
        ({0, 1}, ["-tp", "2"], None),  # one list for each rank
        ({0, 1}, ["--pipeline-parallel-size=2"], None),
    ],
)
def test_cpus_bound(monkeypatch, cpus, extra, bound):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cpus)
    wanted = {} if bound is None else {"VLLM_CPU_OMP_THREADS_BIND": bound}
    assert launch.serve_environment(extra=extra, cpu=True) == wanted
    assert launch.serve_environment(extra=extra, cpu=False) == {}


def test_own_binding_is_left_alone(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0")
    assert launch.serve_environment(cpu=True) == {}


# ---- the command ----


def test_serve_replaces_the_process(monkeypatch):
    calls = []
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call))
    cli.main(["serve", "--model", "m", "--budget", "64", "--", "--max-num-seqs", "4"])
    [(program, argv, environment)] = calls
    assert program == argv[0]
    assert argv[1:3] == ["serve", "m"]
    assert argv[-2:] == ["--max-num-seqs", "4"]
    assert environment.items() >= os.environ.items()


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"vllm-evict {__version__}\n"


@pytest.mark.parametrize("argv", [[], ["no-such-command"], ["serve", "--no-such-option"]])
def test_wrong_command_line(argv, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(argv)
    assert "usage: vllm-evict" in capsys.readouterr().err
