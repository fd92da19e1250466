"""The spec's numbers, and the line about them at start-up."""

import logging
import pickle

import pytest
import torch
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from tests.bookkeeping.harness import LAYER, PAGE_TOKENS, STOCK_SPEC, Bench, configured, make_spec, window_spec
from vllm_evict.engine.block_manager import EvictingBlockManager
from vllm_evict.engine.spec import EvictingAttentionSpec


def spec(budget_tokens=16, max_in_flight_tokens=16, max_request_tokens=64, **layer):
    return EvictingAttentionSpec(
        **LAYER | layer,
        budget_tokens=budget_tokens,
        max_in_flight_tokens=max_in_flight_tokens,
        max_request_tokens=max_request_tokens,
    )


@pytest.mark.parametrize(
    ("budget_tokens", "max_in_flight_tokens", "max_request_tokens", "max_pages"),
    [
        (16, 16, 64, 4 + 4 + 1),
        (13, 16, 64, 4 + 4 + 1),  # the budget rounds up
        (16, 13, 64, 4 + 4 + 1),  # and so does what is in flight
        (16, 1, 64, 4 + 1 + 1),
        (16, 64, 64, 16),  # never more than the whole request
        (64, 16, 64, 16),
        (640, 16, 64, 16),
        (16, 16, 63, 9),
        (16, 16, 33, 9),
        (16, 16, 32, 8),
        (None, 16, 64, 16),
        (None, 16, 61, 16),
        (None, 16, 60, 15),
    ],
)
def test_most_pages_of_a_request_by_hand(budget_tokens, max_in_flight_tokens, max_request_tokens, max_pages):
    assert spec(budget_tokens, max_in_flight_tokens, max_request_tokens).max_pages == max_pages


@pytest.mark.parametrize(
    ("settings", "budget_tokens"),
    [
        ({"policy": "h2o", "budget": 24}, 24),
        ({"policy": "streaming", "budget": 24}, 24),
        ({"policy": "keep-all"}, None),
    ],
)
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_from_a_config(stock_config, settings, budget_tokens, async_scheduling):
    config = configured(stock_config, settings, chunk_tokens=12, max_model_len=48, async_scheduling=async_scheduling)
    ours = make_spec(config)
    assert (ours.budget_tokens, ours.max_request_tokens) == (budget_tokens, 48)
    assert ours.max_in_flight_tokens == (24 if async_scheduling else 12)
    for name in FullAttentionSpec.__dataclass_fields__:
        assert getattr(ours, name) == getattr(STOCK_SPEC, name), name
    assert ours.page_size_bytes == STOCK_SPEC.page_size_bytes


def test_memory_at_start_up_follows_a_model_length_that_vllm_has_lowered(stock_config):
    config = configured(stock_config, {"policy": "h2o", "budget": 16}, max_model_len=64)
    ours = make_spec(config)
    assert ours.max_memory_usage_bytes(config) == 9 * ours.page_size_bytes
    config.model_config.max_model_len = 20
    assert ours.max_memory_usage_bytes(config) == 5 * ours.page_size_bytes


def test_merging_layers_keeps_our_fields():
    merged = EvictingAttentionSpec.merge([spec(), spec(), spec()])
    assert merged == spec() and type(merged) is EvictingAttentionSpec
    assert FullAttentionSpec.merge([STOCK_SPEC, STOCK_SPEC]) == STOCK_SPEC


def test_layers_of_different_budgets_do_not_merge():
    with pytest.raises(AssertionError):
        EvictingAttentionSpec.merge([spec(16), spec(20)])


def test_it_travels_between_processes():
    assert pickle.loads(pickle.dumps(spec())) == spec()


def test_registering_ours_leaves_vllm_s_own_in_place():
    """C46."""
    get = KVCacheSpecRegistry.get_manager_class
    assert get(spec()) is EvictingBlockManager
    assert get(STOCK_SPEC) is FullAttentionManager
    assert get(window_spec(8)).__name__ == "SlidingWindowManager"
    assert get(MLAAttentionSpec(**LAYER)) is not EvictingBlockManager
    base = KVCacheSpecRegistry.get_uniform_type_base_spec
    assert base(spec()) is FullAttentionSpec and base(window_spec(8)) is SlidingWindowSpec


# ---- the line in the log ----


class Lines(logging.Handler):
    """Collects messages."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


@pytest.fixture
def start_up_line(stock_config):
    """The one line that a scheduler with these options logs."""

    def line(**options):
        lines = Lines()
        logger = logging.getLogger("vllm.vllm_evict")
        level = logger.level
        logger.setLevel(logging.INFO)  # whoever imported vLLM first may have silenced it
        logger.addHandler(lines)
        try:
            Bench(stock_config, **options)
        finally:
            logger.removeHandler(lines)
            logger.setLevel(level)
        (message,) = lines.messages
        return message

    return line


def test_the_line_says_policy_lengths_bounds_and_concurrency(start_up_line):
    """Budget 18 tokens = 5 pages; 40 usable pages; 16 pages for a whole request."""
    line = start_up_line(policy="h2o", settings={"budget": 18, "sink": 3, "recent": 8}, num_blocks=41)
    for part in (
        "KV eviction h2o: pages of 4 tokens",
        "budget 18 tokens = 5 pages",
        "sink 3 tokens = 1 pages",
        "recent 8 tokens = 2 pages",
        "at most 6 pages decoding, 10 in prefill",
        "40 usable pages",
        "without eviction 2.50x requests of 64 tokens",
        "with eviction 6.67x decoding (4.00x in prefill)",
    ):
        assert part in line
    assert "\n" not in line


def test_the_line_of_a_policy_that_keeps_all(start_up_line):
    line = start_up_line(policy="keep-all", num_blocks=41)
    assert "nothing is evicted" in line and "2.50x requests of 64 tokens" in line


def test_the_line_of_a_budget_beyond_the_model(start_up_line):
    """Eviction brings nothing there, and the line says so: the same concurrency twice."""
    line = start_up_line(policy="h2o", settings={"budget": 640, "recent": None}, num_blocks=41)
    assert "at most 16 pages decoding, 16 in prefill" in line
    assert "without eviction 2.50x" in line and "with eviction 2.50x decoding (2.50x in prefill)" in line


def test_c25_a_page_larger_than_the_window_is_said_in_tokens_and_pages(start_up_line):
    """Sink 1, recent 1, budget 5: a page each, and what they became is in the line."""
    line = start_up_line(settings={"budget": 5, "sink": 1, "recent": 1})
    assert "budget 5 tokens = 2 pages; sink 1 tokens = 1 pages; recent 1 tokens = 1 pages" in line


def test_the_dtype_of_the_layer_is_part_of_the_page():
    assert spec(dtype=torch.bfloat16).page_size_bytes * 2 == spec(dtype=torch.float32).page_size_bytes
    assert spec().page_size_bytes == PAGE_TOKENS * 8 * 4 * 2
