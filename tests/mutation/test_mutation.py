"""The tests of the engine are worth their name: injected faults turn them red."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def mutation_run(*arguments: str) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "tests.mutation", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=1800
    )
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    return run.stdout


def test_the_faults_asked_for_are_seen():
    out = mutation_run("--fast")
    assert "5 of 5 faults seen" in out


@pytest.mark.slow
def test_every_fault_is_seen():
    out = mutation_run()
    assert "NOT SEEN" not in out
