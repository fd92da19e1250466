"""`examples/endless_chat.py`: a chat goes on past the length of its model."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.serve.server import THREADS, end, start

ROOT = Path(__file__).parents[2]
BUDGET_TOKENS, PAGE_TOKENS, MODEL_TOKENS = 512, 32, 1024


@pytest.mark.serve
@pytest.mark.parametrize(
    ("num_turns", "answer_tokens"), [(14, 80), pytest.param(50, 40, marks=pytest.mark.slow)], ids=["14", "50"]
)
def test_every_turn_is_answered(tmp_path, num_turns, answer_tokens):
    """Each answer is not empty, however long the conversation that was sent."""
    log = tmp_path / "chat.log"
    command = [sys.executable, str(ROOT / "examples" / "endless_chat.py"), "--model-tokens", str(MODEL_TOKENS)]
    command += ["--turns", str(num_turns), "--answer-tokens", str(answer_tokens)]
    process = start(command, log, THREADS)
    try:
        process.wait(1500)
    finally:
        end(process)  # it stops its server on SIGTERM
    said = log.read_text()
    assert process.returncode == 0, said[-6000:]
    turns = [tuple(map(int, turn)) for turn in re.findall(r"turn +(\d+): +(\d+) tokens, (\d+) held: ", said)]
    assert [number for number, _, _ in turns] == list(range(1, num_turns + 1))
    tokens = [total for _, total, _ in turns]
    assert tokens == sorted(tokens) and tokens[-1] > 1.1 * MODEL_TOKENS
    assert all(held <= BUDGET_TOKENS + PAGE_TOKENS for _, _, held in turns)
    num_rebases = int(re.search(rf"{num_turns} turns answered, positions moved (\d+) times", said)[1])
    assert num_rebases > 0
