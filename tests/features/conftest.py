"""vLLM's features with eviction active: engines and models are those of tests/engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.conftest import engine, engine_environment, models  # noqa: F401  fixtures, for this package too


@pytest.fixture(scope="package")
def tokenizer(tmp_path_factory) -> Path:
    """A folder with a tokenizer of 512 tokens: 256 bytes, 255 pairs of letters, and the end of a text."""
    from tests.models.text import tiny_tokenizer

    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="package")
def speaking(engine, tokenizer):  # noqa: F811
    """`engine`, with the tokenizer."""
    return lambda *model, **arguments: engine(*model, skip_tokenizer_init=False, tokenizer=str(tokenizer), **arguments)
