"""The CPU key-difference kernel against the slow reference, with K written by vLLM's own op."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from vllm import _custom_ops as ops

from tests.unit.test_page_mass_cpu import ALL_DTYPES, error, vllm_layout, write_as
from vllm_evict.scores import cpu_keys
from vllm_evict.scores.cpu_keys import add_key_difference
from vllm_evict.scores.cpu_layout import KeyLayout
from vllm_evict.scores.reference import key_difference_reference

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"), reason="this vLLM is not the CPU build"
)

NUM_BLOCKS = 48
MAX_PAGES = 14
UNTOUCHED = 7.0  # what key_difference holds before
#: Tokens each request holds: at and around page borders of 16, 32, 64 and 128 tokens.
REQUESTS = (1, 5, 32, 33, 127, 128, 200, 0)
WEIGHT = 0.25
#: A cosine of fp32 roundings (6e-8 each), per KV head; and what adding it to UNTOUCHED costs.
FP32_BOUND = 5e-7 + UNTOUCHED * 2**-23


@dataclass(frozen=True)
class Batch:
    """Arguments of add_key_difference, and the same keys row-major for the reference."""

    key_cache: torch.Tensor
    row_major_keys: torch.Tensor
    block_table: torch.Tensor
    num_tokens: np.ndarray
    layout: KeyLayout

    def key_difference(self) -> torch.Tensor:
        result = torch.full(self.block_table.shape, UNTOUCHED)
        add_key_difference(
            key_cache=self.key_cache,
            block_table=self.block_table,
            num_tokens=self.num_tokens,
            key_difference=result,
            weight=WEIGHT,
            layout=self.layout,
        )
        return result

    def reference(self, compute_dtype: torch.dtype = torch.float64) -> torch.Tensor:
        result = torch.full(self.block_table.shape, UNTOUCHED, dtype=torch.float64)
        key_difference_reference(
            key_cache=self.row_major_keys,
            block_table=self.block_table,
            num_tokens=torch.from_numpy(self.num_tokens),
            key_difference=result,
            weight=WEIGHT,
            compute_dtype=compute_dtype,
        )
        return result


def make_batch(*, layout, dtype=torch.float32, kv_heads=2, isa=None, garbage=math.nan) -> Batch:
    """Requests with pages in random places; all that nobody wrote holds `garbage`."""
    generator = torch.Generator().manual_seed(1)
    page, head_size = layout.block_size, layout.head_size
    cache = torch.full((NUM_BLOCKS, kv_heads, 2 * page, head_size), garbage, dtype=dtype)
    key_cache = cache.chunk(2, dim=2)[0]
    row_major_keys = torch.full((NUM_BLOCKS, kv_heads, page, head_size), garbage, dtype=dtype)
    free = torch.randperm(NUM_BLOCKS, generator=generator)
    block_table = torch.full((len(REQUESTS), MAX_PAGES), -1, dtype=torch.int32)  # an index nobody may follow
    for row, length in enumerate(REQUESTS):
        num_pages = -(-length // page)
        pages, free = free[:num_pages], free[num_pages:]
        assert len(pages) == num_pages
        block_table[row, :num_pages] = pages
        slots = (pages[:, None] * page + torch.arange(page)).flatten()[:length]
        # A common direction, as real keys have, of another length in each token.
        key = torch.randn(length, kv_heads, head_size, generator=generator) + 0.7
        key = (key * torch.rand(length, 1, 1, generator=generator)).to(dtype)
        if isa is None:
            write_as(layout, key, key_cache, slots)
        else:
            ops.cpu_attn_reshape_and_cache(key, key.clone(), *cache.chunk(2, dim=2), slots, isa)
        row_major_keys.transpose(1, 2)[slots // page, slots % page] = key
    return Batch(key_cache, row_major_keys, block_table, np.array(REQUESTS, dtype=np.int32), layout)


CASES = [
    (isa, page, head_size, kv_heads, dtype)
    for isa, page, head_size, kv_heads, dtypes in (
        ("vec", 32, 64, 3, ALL_DTYPES),  # SmolLM2
        ("vec", 128, 128, 2, ALL_DTYPES),
        ("vec", 32, 256, 1, ALL_DTYPES),  # Gemma 3
        ("vec16", 16, 80, 2, (torch.float32, torch.bfloat16)),
        ("amx", 32, 64, 3, (torch.bfloat16,)),  # vLLM uses it for bfloat16 only
        ("amx", 128, 128, 1, (torch.bfloat16,)),
    )
    for dtype in dtypes
]


@pytest.mark.parametrize(("isa", "page", "head_size", "kv_heads", "dtype"), CASES)
def test_matches_reference(dtype, isa, page, head_size, kv_heads):
    layout = vllm_layout(isa, page, head_size, dtype)
    batch = make_batch(layout=layout, dtype=dtype, kv_heads=kv_heads, isa=isa)
    exact, got = batch.reference(), batch.key_difference()
    assert error(got, exact) <= FP32_BOUND
    assert torch.equal(got == UNTOUCHED, exact == UNTOUCHED)


@pytest.mark.parametrize(
    "layout",
    [
        KeyLayout(block_size=32, head_size=64, token_group=32, dim_interleave=64),  # row-major
        KeyLayout(block_size=32, head_size=64, token_group=8, dim_interleave=4),  # Arm BFMMLA
    ],
    ids=["row-major", "bfmmla"],
)
def test_layouts_of_other_machines(layout):
    batch = make_batch(layout=layout, dtype=torch.bfloat16)
    assert error(batch.key_difference(), batch.reference()) <= FP32_BOUND


@pytest.fixture(scope="module")
def batch() -> Batch:
    return make_batch(layout=vllm_layout("vec", 32, 64, torch.bfloat16), dtype=torch.bfloat16, isa="vec")


def test_by_hand():
    """The example of reference.py, in pages of 32: the second page has one token."""
    layout = KeyLayout(block_size=32, head_size=64, token_group=32, dim_interleave=1)
    cache = torch.full((2, 1, 32, 64), math.nan)
    keys = torch.zeros(33, 1, 64)
    keys[:16, 0, 3] = 2.0
    keys[16:32, 0, 9] = 5.0
    keys[32, 0, 3] = 1.0
    write_as(layout, keys, cache, torch.arange(33))
    result = torch.zeros(1, 2)
    add_key_difference(
        key_cache=cache,
        block_table=torch.tensor([[0, 1]], dtype=torch.int32),
        num_tokens=np.array([33]),
        key_difference=result,
        weight=1.0,
        layout=layout,
    )
    length = math.hypot(17, 16)  # the anchor is (17, 16)
    assert result.tolist() == [[pytest.approx(-(16 * 17 + 16 * 16) / length / 32), pytest.approx(-17 / length)]]


def test_keys_of_zero_are_no_fault():
    layout = KeyLayout(block_size=32, head_size=64, token_group=32, dim_interleave=1)
    result = torch.zeros(1, 1)
    add_key_difference(
        key_cache=torch.zeros(1, 1, 32, 64),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        num_tokens=np.array([7]),
        key_difference=result,
        weight=1.0,
        layout=layout,
    )
    assert result.tolist() == [[0.0]]


@pytest.mark.parametrize("garbage", [0.0, float("inf"), float("-inf"), 1e4])
def test_garbage_nobody_wrote_does_not_matter(batch, garbage):
    other = make_batch(layout=batch.layout, dtype=torch.bfloat16, isa="vec", garbage=garbage)
    assert torch.equal(other.key_difference(), batch.key_difference())


def test_company_does_not_matter(batch):
    together = batch.key_difference()
    for row in range(len(REQUESTS)):
        one = slice(row, row + 1)
        alone = replace(batch, block_table=batch.block_table[one], num_tokens=batch.num_tokens[one])
        assert torch.equal(alone.key_difference(), together[one])


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_number_of_threads_does_not_matter(batch, threads, monkeypatch):
    expected = batch.key_difference()
    monkeypatch.setattr(cpu_keys, "num_threads", lambda: threads)
    for _ in range(50):  # a lost race shows rarely
        assert torch.equal(batch.key_difference(), expected)


@pytest.mark.parametrize("fault", ["one token fewer", "neighbour's pages", "pages swapped"])
def test_the_bound_tells_faults_from_rounding(batch, fault):
    wrong = {
        "one token fewer": replace(batch, num_tokens=batch.num_tokens - (batch.num_tokens > 1)),
        "neighbour's pages": replace(batch, block_table=batch.block_table[[0, 1, 2, 3, 5, 4, 6, 7]]),
        "pages swapped": replace(batch, block_table=batch.block_table[:, [1, 0, *range(2, MAX_PAGES)]]),
    }[fault]
    if fault == "pages swapped":
        wrong.block_table[wrong.block_table[:, 0] < 0, 0] = 0
        wrong = replace(wrong, num_tokens=np.where(batch.num_tokens > 32, batch.num_tokens, 0).astype(np.int32))
    row_4 = 4  # 127 tokens, its neighbour 128
    assert error(wrong.key_difference()[row_4], batch.reference()[row_4]) > 100 * FP32_BOUND


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: {"num_tokens": b.num_tokens * 10}, "num_tokens"),
        (lambda b: {"num_tokens": b.num_tokens - 1}, "num_tokens"),
        (lambda b: {"num_tokens": b.num_tokens[1:]}, "num_tokens"),
        (lambda b: {"num_tokens": b.num_tokens + 32}, "block_table"),  # the next page is -1
        (lambda b: {"block_table": b.block_table + NUM_BLOCKS}, "block_table"),
        (lambda b: {"block_table": b.block_table.long()}, "block_table"),
        (lambda b: {"key_cache": b.key_cache.double()}, "dtype torch.float64"),
        (lambda b: {"key_cache": b.key_cache[..., :32]}, "key_cache has shape"),
    ],
)
def test_what_would_be_read_wrongly_is_refused(batch, change, message):
    with pytest.raises(ValueError, match=f"key difference: .*{message}"):
        replace(batch, **change(batch)).key_difference()
