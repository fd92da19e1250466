"""docs/compatibility.md is what the code says (C45)."""

from __future__ import annotations

from tests.documents import ROOT, missing_tests
from vllm_evict.engine.compatibility import render
from vllm_evict.engine.support import LAYER_REFUSALS, REFUSALS


def test_compatibility_is_what_the_code_says():
    path = ROOT / "docs" / "compatibility.md"
    assert path.read_text() == render(), (
        "write it anew: python -m vllm_evict.engine.compatibility docs/compatibility.md"
    )


def test_every_refusal_and_every_proof_is_in_it():
    text = render()
    for refusal in REFUSALS + LAYER_REFUSALS:
        assert refusal.feature in text and refusal.why in text and refusal.instead in text
    assert not missing_tests(text)
