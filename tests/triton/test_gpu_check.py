"""deploy/gpu-check without a GPU."""

import importlib.util
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


@pytest.mark.parametrize(
    ("found", "is_same"),
    [
        ([1.0, None, 0.2], True),
        ([0.96, None, 0.24], True),  # 5 % of the highest
        ([1.0, None, 0.26], False),
        ([1.0, 0.0, 0.2], False),  # judged here, not there
        ([1.0, None, None], False),
        ([1.0, None], False),
        ([], False),
    ],
)
def test_scores_of_two_servers_are_the_same_up_to_rounding(found, is_same):
    spec = importlib.util.spec_from_file_location("serve_check", FOLDER / "serve_check.py")
    serve_check = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = serve_check  # its dataclass looks itself up
    spec.loader.exec_module(serve_check)
    assert serve_check.same_scores(found, [1.0, None, 0.2]) is is_same
