"""What the user is told: our lines leave through vLLM's own handler."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

from tests.engine.harness import PAGE_TOKENS as P
from tests.engine.harness import random_prompt


def test_info_line_comes_out(engine):
    """A logger outside of vLLM's namespace would have no handler."""
    ours = logging.getLogger("vllm.vllm_evict")
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(logging.Formatter("%(levelname)s %(filename)s %(message)s"))
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    try:
        with engine(eviction={"policy": "streaming", "budget": 100, "sink": 4}, quiet=False) as served:
            assert served.manager.block_size == P
    finally:
        ours.removeHandler(handler)
        ours.setLevel(logging.NOTSET)
    # vLLM's handler: its formatter puts the file in front. Set up by the time a config is there, and ours goes to it.
    assert logging.getLogger("vllm").handlers and ours.propagate and ours.parent is logging.getLogger("vllm")
    out = handler.stream.getvalue()
    (line,) = [line for line in out.splitlines() if "KV eviction streaming" in line]
    assert "INFO" in line and "scheduler.py" in line
    for words in (
        "pages of 32 tokens",
        "budget 100 tokens = 4 pages",
        "sink 4 tokens = 1 pages",
        "recent 96 tokens = 3 pages",
        "at most 5 pages decoding, 7 in prefill",
        "127 usable pages",
        "concurrency without eviction 1.98x requests of 2,048 tokens",
        "with eviction 25.40x decoding",
    ):
        assert words in line


def test_trace_is_complete_while_the_engine_runs(engine):
    """One JSON line per eviction, readable at once."""
    with engine(eviction={"policy": "h2o", "budget": 3 * P}) as served:
        served.begin()
        served.add("a", random_prompt(6 * P, seed=1), max_tokens=2 * P)
        for _ in range(4):
            served.step()
        (line,) = [json.loads(text) for text in Path(served.eviction["trace"]).read_text().splitlines()][-1:]
        assert line["request"] == served.request_id("a")
        assert line["reason"] == "budget" and line["num_computed_tokens"] == 6 * P
        assert len(line["resident"]) - len(line["pages"]) == 3 and len(line["scores"]["attention"]) == len(
            line["resident"]
        )
        served.abort("a")
        served.step()
