"""Which cached tokens stay: the rule that StreamingLLM and H2O share."""

from __future__ import annotations

import torch


def kept_slots(
    *, positions: torch.Tensor, worth: torch.Tensor, max_budget: int, sink_size: int, recent_size: int
) -> torch.Tensor:
    """The slots that stay, ascending: long ``[..., min(num_slots, max_budget)]``.

    Sinks and the recent window stay; of the rest the lowest worth goes first, the older first among
    equals. Padding goes before any token, so a batch keeps one rectangular cache and a padded row
    still holds as many tokens as it would alone.

    Args:
        positions: long ``[..., num_slots]``, the place of each slot's token in its text; -1 for padding.
        worth: float ``[..., num_slots]``, higher = keep. H2O: attention received so far. StreamingLLM: the position.
        max_budget: slots that may stay, at least ``sink_size + recent_size``.
        sink_size: first tokens of the text that always stay.
        recent_size: newest tokens that always stay.

    Example, budget 4, one sink, two recent tokens:
        positions   0    1    2    3    4
        worth       .1   .6   .2   .5   .3
                    sink      goes recent recent      -> slots 0 1 3 4

    """
    num_slots = positions.shape[-1]
    newest = positions.amax(dim=-1, keepdim=True)
    protected = (positions < sink_size) | (positions > newest - recent_size)
    worth = worth.masked_fill(protected, float("inf")).masked_fill(positions < 0, float("-inf"))
    worst_first = worth.argsort(dim=-1, stable=True)
    return worst_first[..., max(num_slots - max_budget, 0) :].sort(dim=-1).values
