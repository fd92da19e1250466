"""deploy/gpu-check without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "deploy" / "gpu-check"


def run(script, *arguments, **options):
    # As on a bare machine: nothing but the checkout leads to our package.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, str(FOLDER / script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, **options)


def test_the_kernels_under_the_interpreter(tmp_path):
    pytest.importorskip("triton", reason="no Triton here")
    done = run("gpu_check.py", "--interpret", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "gpu-check: ok"
    report = json.loads((tmp_path / "gpu-check.json").read_text())
    assert report["passed"] and len(report["checks"]) > 10 and len(report["timings"]) == 1
    assert all(check["passed"] for check in report["checks"])


def test_a_machine_without_a_gpu_fails(tmp_path):
    pytest.importorskip("triton", reason="no Triton here")
    done = run("gpu_check.py", cwd=tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "gpu-check: FAILED")


def test_the_combinations_to_serve():
    lines = run("serve_check.py", "--list").stdout.splitlines()
    assert len(lines) == 4 * 2 * 2
    assert lines[0] == "TRITON_ATTN, V1 model runner, CUDA graphs on"
    chosen = run("serve_check.py", "--list", "--backends", "FLASHINFER", "--runners", "1", "--graphs", "off").stdout
    assert chosen == "FLASHINFER, V2 model runner, CUDA graphs off\n"
    assert "serve-check: ok" in run("serve_check.py", "--help").stdout
    assert run("serve_check.py").returncode == 2
