"""Which pages to keep: one policy, one file, one overridden method.

To add a policy: write ``policies/my_policy.py`` with a frozen dataclass that
overrides ``EvictionPolicy.rank`` and name it in ``POLICIES`` below.
"""

from __future__ import annotations

from typing import Any

from vllm_evict.policies.base import EvictionPolicy
from vllm_evict.policies.h2o import H2O
from vllm_evict.policies.h2o_keydiff import H2OKeyDiff
from vllm_evict.policies.keep_all import KeepAll
from vllm_evict.policies.keydiff import KeyDiff
from vllm_evict.policies.random_pages import RandomPages
from vllm_evict.policies.streaming import Streaming

POLICIES: dict[str, type[EvictionPolicy]] = {
    "streaming": Streaming,
    "h2o": H2O,
    "keydiff": KeyDiff,
    "h2o-keydiff": H2OKeyDiff,
    "random": RandomPages,
    "keep-all": KeepAll,
}


def get_policy(name: str, **settings: Any) -> EvictionPolicy:
    """The policy called ``name``.

    Raises:
        ValueError: no policy has that name; the message lists those that exist.

    """
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; choose one of {', '.join(POLICIES)}")
    return POLICIES[name](**settings)


__all__ = ["POLICIES", "EvictionPolicy", "get_policy"]
