"""`examples/endless_chat.py`: a chat goes on past the length of its model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUDGET_TOKENS, MODEL_TOKENS, CHUNK_TOKENS = 512, 1024, 256


@pytest.mark.serve
@pytest.mark.parametrize(
    ("num_turns", "answer_tokens"), [(14, 80), pytest.param(50, 40, marks=pytest.mark.slow)], ids=["14", "50"]
)
def test_every_turn_is_answered(num_turns, answer_tokens):
    command = [sys.executable, "examples/endless_chat.py", "--model-tokens", str(MODEL_TOKENS)]
    command += ["--turns", str(num_turns), "--answer-tokens", str(answer_tokens)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    turns = [tuple(map(int, turn)) for turn in re.findall(r"turn +(\d+): +(\d+) tokens, (\d+) held: ", done.stdout)]
    assert [number for number, _, _ in turns] == list(range(1, num_turns + 1))
    tokens = [total for _, total, _ in turns]
    assert tokens == sorted(tokens) and tokens[-1] > 1.2 * MODEL_TOKENS
    # Whole pages of 32, and what a chunk brings before the next step trims.
    assert all(held <= BUDGET_TOKENS + CHUNK_TOKENS + 32 for _, _, held in turns)
    assert f"{num_turns} turns answered" in done.stdout
