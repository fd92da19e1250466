"""What is read: stretches of a text, and passages of each that come a second time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

PLACES_PER_CONTEXT = 3
FIRST_PLACE = 32
"""Passages start behind the page of the sinks, which every method keeps."""


@dataclass(frozen=True)
class Context:
    """A stretch of text.

    Args:
        number: of this stretch, from 0.
        tokens: long [context_tokens].
        places: where the passages start that are read again afterwards, one in each third of the stretch.
        passage_tokens: how long they are.

    """

    number: int
    tokens: torch.Tensor
    places: tuple[int, ...]
    passage_tokens: int

    def passage(self, place: int) -> torch.Tensor:
        """long [passage_tokens]"""
        return self.tokens[place : place + self.passage_tokens]

    def window_has(self, place: int, window_tokens: int) -> bool | None:
        """Whether the newest `window_tokens` hold the passage while it is read again: yes, no, or (None) in part."""
        oldest_held = len(self.tokens) - window_tokens
        if place + self.passage_tokens <= oldest_held:
            return False
        return True if place >= oldest_held + self.passage_tokens else None


def contexts(
    tokens: Sequence[int], number: int, *, context_tokens: int, passage_tokens: int, seed: int
) -> list[Context]:
    """`number` stretches from everywhere in the text, without overlap, and random places in them.

    The text falls into as many parts as there are stretches, and each stretch comes from the second half of its part:
    what is tried out on the first halves was not chosen by the passages that are reported.
    """
    generator = np.random.default_rng(seed)
    half = len(tokens) // number // 2
    if half < context_tokens:
        raise ValueError(
            f"a text of {len(tokens)} tokens is too short for {number} stretches of {context_tokens} tokens and as "
            "much again to try things out on; ask for fewer or shorter stretches"
        )
    made = []
    for i in range(number):
        start = (2 * i + 1) * half + int(generator.integers(half - context_tokens + 1))
        borders = np.linspace(FIRST_PLACE, context_tokens - passage_tokens, PLACES_PER_CONTEXT + 1)
        places = tuple(int(generator.integers(int(low), int(high))) for low, high in itertools.pairwise(borders))
        stretch = torch.tensor(tokens[start : start + context_tokens])
        made.append(Context(i, stretch, places, passage_tokens))
    return made
