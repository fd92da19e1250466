"""A tokenizer for the tiny models, whose 512 tokens mean nothing: any of them may follow any other in a valid text."""

from __future__ import annotations

import json
import string
from itertools import islice, product
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = 511


def tiny_tokenizer(path: Path) -> Path:
    """The printable characters of ASCII, pairs of small letters, and the end of a text."""
    characters = [chr(code) for code in range(33, 127)] + [
        "\u0120"
    ]  # the last one is how byte-level BPE writes a space
    pairs = list(islice(product(string.ascii_lowercase, repeat=2), END_OF_TEXT - len(characters)))
    vocabulary = {text: token for token, text in enumerate([*characters, *map("".join, pairs), "</s>"])}
    assert vocabulary["</s>"] == END_OF_TEXT
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))  # vLLM looks for one beside a tokenizer
    return path
