"""The CPU page-mass kernel against the slow reference, with K written by vLLM's own op."""

import functools
from dataclasses import dataclass, replace

import numba
import numpy as np
import pytest
import torch
from vllm import _custom_ops as ops

from vllm_evict.scores import cpu
from vllm_evict.scores.cpu import KeyLayout, ObservedQueries, add_page_mass, detect_key_layout
from vllm_evict.scores.cpu_vector import make_rescale
from vllm_evict.scores.reference import page_mass_reference

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"), reason="this vLLM is not the CPU build"
)

NUM_BLOCKS = 48
MAX_PAGES = 14
UNTOUCHED = 7.0  # what page_mass holds before
#: Tokens each request holds, and how many of its last ones are observed: decodes and prefill chunks, at and around
#: page borders of 16, 32, 64 and 128 tokens.
REQUESTS = ((1, 1), (5, 3), (32, 1), (33, 20), (127, 5), (128, 40), (200, 64), (191, 1))


def write_with_vllm(key, key_cache, slots, isa):
    ops.cpu_attn_reshape_and_cache(key, key.clone(), key_cache, torch.empty_like(key_cache), slots, isa)


def write_as(layout: KeyLayout, key, key_cache, slots):
    """Store keys in any layout; stands in for the op of a machine that we do not have."""
    num_kv_heads = key_cache.shape[1]
    for k, slot in zip(key, slots.tolist(), strict=True):
        block, offsets = slot // layout.block_size, layout.offsets()[slot % layout.block_size]
        for head in range(num_kv_heads):
            key_cache[block, head].view(-1)[offsets] = k[head]


@functools.cache
def vllm_layout(isa: str, block_size: int, head_size: int, dtype: torch.dtype) -> KeyLayout:
    return detect_key_layout(
        functools.partial(write_with_vllm, isa=isa), block_size=block_size, head_size=head_size, dtype=dtype, isa=isa
    )


@dataclass(frozen=True)
class Batch:
    """Arguments of add_page_mass, and the same keys row-major for the reference."""

    query: torch.Tensor
    key_cache: torch.Tensor
    row_major_keys: torch.Tensor
    block_table: torch.Tensor
    observed: ObservedQueries
    layout: KeyLayout
    softcap: float = 0.0
    weight: float = 0.5

    @property
    def scale(self) -> float:
        return self.layout.head_size**-0.5

    def start(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((len(self.observed), MAX_PAGES), UNTOUCHED, dtype=dtype)

    def page_mass(self) -> torch.Tensor:
        page_mass = self.start()
        add_page_mass(
            query=self.query,
            key_cache=self.key_cache,
            block_table=self.block_table,
            observed=self.observed,
            page_mass=page_mass,
            scale=self.scale,
            weight=self.weight,
            softcap=self.softcap,
            layout=self.layout,
        )
        return page_mass

    def reference(self, compute_dtype: torch.dtype = torch.float64) -> torch.Tensor:
        page_mass = self.start(torch.float64)
        page_mass_reference(
            query=self.query,
            key_cache=self.row_major_keys,
            block_table=self.block_table,
            token=torch.from_numpy(self.observed.token),
            row=torch.from_numpy(self.observed.row),
            visible_tokens=torch.from_numpy(self.observed.visible_tokens),
            page_mass=page_mass,
            scale=self.scale,
            weight=self.weight,
            softcap=self.softcap,
            compute_dtype=compute_dtype,
        )
        return page_mass

    def only(self, chosen: np.ndarray) -> "Batch":
        o = self.observed
        return replace(self, observed=ObservedQueries(o.token[chosen], o.row[chosen], o.visible_tokens[chosen]))


def make_batch(
    *,
    layout: KeyLayout,
    dtype: torch.dtype = torch.float32,
    heads: int = 6,
    kv_heads: int = 2,
    isa: str | None = None,
    softcap: float = 0.0,
    requests=REQUESTS,
    garbage: float = float("nan"),
) -> Batch:
    """Requests with pages in random places; all that nobody wrote holds `garbage`."""
    generator = torch.Generator().manual_seed(1)
    page, head_size = layout.block_size, layout.head_size
    # As in vLLM: K and V of a page side by side, so that K is strided over blocks and heads.
    cache = torch.full((NUM_BLOCKS, kv_heads, 2 * page, head_size), garbage, dtype=dtype)
    key_cache = cache.chunk(2, dim=2)[0]
    row_major_keys = torch.full((NUM_BLOCKS, kv_heads, page, head_size), garbage, dtype=dtype)
    free = torch.randperm(NUM_BLOCKS, generator=generator)
    block_table = torch.full((len(requests), MAX_PAGES), -1, dtype=torch.int32)  # an index nobody may follow
    token, row, visible = [], [], []
    for i, (length, num_observed) in enumerate(requests):
        num_pages = -(-length // page)
        pages, free = free[:num_pages], free[num_pages:]
        assert len(pages) == num_pages
        block_table[i, :num_pages] = pages
        slots = (pages[:, None] * page + torch.arange(page)).flatten()[:length]
        key = torch.randn(length, kv_heads, head_size, generator=generator).to(dtype)
        if isa is None:
            write_as(layout, key, key_cache, slots)
        else:
            ops.cpu_attn_reshape_and_cache(key, key.clone(), *cache.chunk(2, dim=2), slots, isa)
        row_major_keys.transpose(1, 2)[slots // page, slots % page] = key
        token += range(len(token) + 2, len(token) + 2 + num_observed)  # unobserved tokens come before
        row += [i] * num_observed
        visible += range(length - num_observed + 1, length + 1)
    num_tokens = max(token) + 1
    # The query is a slice of a fused projection, as in vLLM. Twice the usual spread makes sharp softmaxes.
    qkv = 2 * torch.randn(num_tokens, (heads + 2 * kv_heads) * head_size, generator=generator)
    query = qkv.to(dtype)[:, : heads * head_size].view(num_tokens, heads, head_size)
    observed = ObservedQueries(token, row, visible)
    return Batch(query, key_cache, row_major_keys, block_table, observed, layout, softcap)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert got.shape == expected.shape and not torch.isnan(got).any()
    return (got.double() - expected.double()).abs().max().item()


def fp32_bound(batch: Batch) -> float:
    """Mass per head is at most 1, and a handful of fp32 roundings (6e-8 each) of exponents up to 2^4 lie on the way."""
    return 1e-6 * batch.weight * batch.query.shape[1] + UNTOUCHED * 2**-23


# --- the numbers ----------------------------------------------------------------------------------


ALL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = [
    (isa, page, head_size, heads, kv_heads, dtype)
    for isa, page, head_size, heads, kv_heads, dtypes in (
        ("vec", 32, 64, 9, 3, ALL_DTYPES),  # SmolLM2
        ("vec", 64, 64, 4, 4, ALL_DTYPES),  # MHA
        ("vec", 128, 128, 16, 2, ALL_DTYPES),  # GQA 8:1
        ("vec", 32, 256, 4, 1, ALL_DTYPES),  # Gemma 3, MQA
        ("vec", 32, 32, 40, 1, ALL_DTYPES),  # more query heads per KV head than a task's rows
        ("vec16", 16, 80, 6, 2, (torch.float32, torch.bfloat16)),
        ("vec16", 32, 80, 2, 1, ALL_DTYPES),
        ("amx", 32, 64, 9, 3, (torch.bfloat16,)),  # vLLM uses it for bfloat16 only
        ("amx", 128, 128, 8, 1, (torch.bfloat16,)),
    )
    for dtype in dtypes
]


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize(("isa", "page", "head_size", "heads", "kv_heads", "dtype"), CASES)
def test_matches_reference(dtype, isa, page, head_size, heads, kv_heads, softcap):
    layout = vllm_layout(isa, page, head_size, dtype)
    batch = make_batch(layout=layout, dtype=dtype, heads=heads, kv_heads=kv_heads, isa=isa, softcap=softcap)
    exact, got = batch.reference(), batch.page_mass()
    assert error(got, exact) <= fp32_bound(batch)
    if dtype != torch.float32:
        assert error(got, exact) <= 2 * error(batch.reference(dtype), exact)


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
    assert error(batch.page_mass(), batch.reference()) <= fp32_bound(batch)


@pytest.fixture(scope="module")
def batch() -> Batch:
    return make_batch(layout=vllm_layout("vec", 32, 64, torch.bfloat16), dtype=torch.bfloat16, isa="vec")


def test_each_query_spreads_weight_times_heads_over_its_visible_pages_only(batch):
    mass = batch.page_mass() - UNTOUCHED
    num_pages = -(-batch.observed.visible_tokens // 32)
    for i, pages in enumerate(num_pages):
        assert mass[i, :pages].sum().item() == pytest.approx(0.5 * 6, rel=1e-5)
        assert (mass[i, :pages] > 0).all()
        assert (mass[i, pages:] == 0).all()


def test_by_hand():
    """Keys are unit vectors, so a logit is one number of the query: 1/8, 2/8, 5/8 as in reference.py."""
    layout = KeyLayout(block_size=32, head_size=64, token_group=32, dim_interleave=1)
    cache = torch.full((2, 1, 32, 64), float("nan"))
    keys = torch.zeros(3, 1, 64)
    keys[[0, 1, 2], 0, [10, 20, 30]] = 1
    write_as(layout, keys[:2], cache, torch.tensor([62, 63]))
    write_as(layout, keys[2:], cache, torch.tensor([0]))
    cache[1, 0].view(-1)[layout.offsets()[:30]] = -100.0  # 30 tokens that nobody would look at
    query = torch.full((1, 1, 64), 1.0)
    query[0, 0, [10, 20, 30]] = torch.tensor([1.0, 2.0, 5.0]).log()
    page_mass = torch.zeros(1, 2)
    add_page_mass(
        query=query,
        key_cache=cache,
        block_table=torch.tensor([[1, 0]], dtype=torch.int32),
        observed=ObservedQueries([0], [0], [33]),
        page_mass=page_mass,
        scale=1.0,
        weight=1.0,
        layout=layout,
    )
    assert page_mass.tolist() == [[pytest.approx(3 / 8), pytest.approx(5 / 8)]]


def test_adds_to_what_is_there(batch):
    once = batch.page_mass()
    mass = once.clone()
    add_page_mass(
        query=batch.query,
        key_cache=batch.key_cache,
        block_table=batch.block_table,
        observed=batch.observed,
        page_mass=mass,
        scale=batch.scale,
        weight=3 * batch.weight,
        layout=batch.layout,
    )
    torch.testing.assert_close(mass - once, 3 * (once - UNTOUCHED), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fault", ["one token fewer", "neighbour's pages", "next query", "scale", "heads reversed"])
def test_the_bound_tells_faults_from_rounding(batch, fault):
    o = batch.observed
    several = o.visible_tokens > 1
    wrong = {
        "one token fewer": replace(batch, observed=ObservedQueries(o.token, o.row, o.visible_tokens - several)),
        "neighbour's pages": replace(batch, block_table=batch.block_table[[0, 1, 2, 3, 5, 4, 6, 7]]),
        "next query": replace(
            batch, observed=ObservedQueries((o.token + 1) % len(batch.query), o.row, o.visible_tokens)
        ),
        "scale": replace(batch, query=batch.query * 1.01),
        "heads reversed": replace(batch, query=batch.query.flip(1)),
    }[fault]
    row_4 = o.row == 4  # 127 tokens, its neighbour 128
    expected = batch.reference()[row_4]
    assert error(wrong.only(row_4).page_mass(), expected) > 100 * fp32_bound(batch)


# --- what must not matter -------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [0.0, float("inf"), float("-inf"), 1e4])
def test_garbage_nobody_wrote_does_not_matter(batch, garbage):
    other = make_batch(layout=batch.layout, dtype=torch.bfloat16, isa="vec", garbage=garbage)
    assert torch.equal(other.page_mass(), batch.page_mass())


def test_garbage_beyond_the_visible_tokens_does_not_matter(batch):
    """A query inside a chunk shares pages with keys written after it."""
    early = batch.only(batch.observed.visible_tokens <= 40)
    before = early.page_mass()
    keys = batch.key_cache.clone()
    for row in range(len(REQUESTS)):
        seen = early.observed.visible_tokens[early.observed.row == row].max(initial=0)
        for page in range(MAX_PAGES):
            block = batch.block_table[row, page]
            hidden = batch.layout.offsets()[max(0, seen - 32 * page) :]
            if block >= 0 and hidden.numel():
                keys[block].view(keys.shape[1], -1)[:, hidden.flatten()] = float("nan")
    assert torch.isnan(keys).sum() > torch.isnan(batch.key_cache).sum()
    assert torch.equal(replace(early, key_cache=keys).page_mass(), before)


def test_company_does_not_matter(batch):
    together = batch.page_mass()
    for row in range(len(REQUESTS)):
        alone = batch.observed.row == row
        assert torch.equal(batch.only(alone).page_mass(), together[alone])


def test_order_of_queries_does_not_matter(batch):
    order = np.random.default_rng(0).permutation(len(batch.observed))
    assert torch.equal(batch.only(order).page_mass(), batch.page_mass()[order])


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_number_of_threads_does_not_matter(batch, threads, monkeypatch):
    one_decode = batch.only(batch.observed.row == 7)
    expected, expected_one = batch.page_mass(), one_decode.page_mass()
    monkeypatch.setattr(cpu, "num_threads", lambda: threads)
    for _ in range(50):  # a lost race shows rarely
        assert torch.equal(batch.page_mass(), expected)
        assert torch.equal(one_decode.page_mass(), expected_one)


def test_size_of_scratch_does_not_matter(batch, monkeypatch):
    expected = batch.page_mass()
    monkeypatch.setattr(cpu, "MAX_SCRATCH_BYTES", 10_000)
    assert torch.equal(batch.page_mass(), expected)


def test_nothing_to_see(batch):
    none = replace(batch, observed=ObservedQueries([], [], []))
    assert none.page_mass().shape == (0, MAX_PAGES)
    blind = replace(batch, observed=ObservedQueries([0, 1], [6, 6], [0, 200])).page_mass()
    assert (blind[0] == UNTOUCHED).all() and blind[1].sum() > MAX_PAGES * UNTOUCHED


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "row", "visible", "message"),
    [
        (10_000, 0, 1, "token"),
        (-1, 0, 1, "token"),
        (0, len(REQUESTS), 1, "row"),
        (0, -1, 1, "row"),
        (0, 6, MAX_PAGES * 32 + 1, "visible_tokens"),
        (0, 6, -1, "visible_tokens"),
        (0, 6, 225, "block_table"),  # 8 pages, of which the last is -1
    ],
)
def test_wrong_indices_are_refused(batch, token, row, visible, message):
    observed = ObservedQueries([0, token], [6, row], [1, visible])
    with pytest.raises(ValueError, match=message):
        replace(batch, observed=observed).page_mass()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: {"key_cache": b.key_cache.float()}, "key_cache is torch.float32"),
        (lambda b: {"query": b.query.double(), "key_cache": b.key_cache.double()}, "dtype torch.float64"),
        (lambda b: {"key_cache": b.key_cache.transpose(2, 3)}, "key_cache has shape"),
        (lambda b: {"query": b.query[..., :32]}, "query has shape"),
        (lambda b: {"query": b.query[:, :5]}, "5 query heads"),
        (lambda b: {"block_table": b.block_table.long()}, "block_table must be int32"),
    ],
)
def test_wrong_tensors_are_refused(batch, change, message):
    with pytest.raises(ValueError, match=message):
        replace(batch, **change(batch)).page_mass()


def test_observed_queries_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="visible_tokens has shape"):
        ObservedQueries([0, 1], [0, 0], [5])


# --- the layout probe -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("isa", "page"), [("vec", 32), ("vec", 128), ("vec16", 16), ("vec16", 64)])
@pytest.mark.parametrize("head_size", [32, 80, 256])
def test_probe_finds_transposed_pages(isa, page, head_size, dtype):
    layout = vllm_layout(isa, page, head_size, dtype)
    assert (layout.token_group, layout.dim_interleave, layout.is_row_major) == (page, 1, False)


def test_probe_finds_amx_pairs():
    layout = vllm_layout("amx", 64, 128, torch.bfloat16)
    assert (layout.token_group, layout.dim_interleave) == (16, 2)


@pytest.mark.parametrize(("group", "interleave"), [(8, 4), (16, 2), (32, 1), (64, 64), (8, 1)])
def test_probe_finds_what_it_can_describe(group, interleave):
    layout = KeyLayout(block_size=64, head_size=64, token_group=group, dim_interleave=interleave)
    found = detect_key_layout(
        functools.partial(write_as, layout), block_size=64, head_size=64, dtype=torch.bfloat16, isa="made up"
    )
    assert found == layout


def _dims_reversed(key, key_cache, slots):
    write_with_vllm(key.flip(-1), key_cache, slots, "vec")


def _tokens_reversed(key, key_cache, slots):
    write_with_vllm(key, key_cache, slots.flip(0), "vec")


def _values_changed(key, key_cache, slots):
    write_with_vllm(key + 1, key_cache, slots, "vec")


def _part_missing(key, key_cache, slots):
    write_with_vllm(key[1:], key_cache, slots[1:], "vec")


def _other_page(key, key_cache, slots):
    write_with_vllm(key, key_cache, slots - 32, "vec")


def _heads_mixed(key, key_cache, slots):
    write_with_vllm(key * torch.tensor([1.0, 0.0])[:, None], key_cache, slots, "vec")


@pytest.mark.parametrize(
    "write_key", [_dims_reversed, _tokens_reversed, _values_changed, _part_missing, _other_page, _heads_mixed]
)
def test_probe_refuses_what_it_cannot_describe(write_key):
    with pytest.raises(ValueError, match=r"isa='strange'.*streaming"):
        detect_key_layout(write_key, block_size=32, head_size=64, dtype=torch.float32, isa="strange")


@pytest.mark.parametrize(("group", "interleave"), [(12, 1), (4, 1), (16, 3), (16, 8)])
def test_layouts_without_code_are_refused(group, interleave):
    with pytest.raises(ValueError, match="must"):
        KeyLayout(block_size=48, head_size=64, token_group=group, dim_interleave=interleave)


# --- the parts ------------------------------------------------------------------------------------


def test_exp2_is_as_exact_as_promised():
    rescale = make_rescale(16)

    @numba.njit
    def exp2(values, out):
        for i in range(0, len(values), 16):
            rescale(values[i:].ctypes.data, out[i:].ctypes.data, np.float32(0))

    values = np.linspace(-126, 0, 1 << 16, dtype=np.float32)
    got = np.ones_like(values)
    exp2(values, got)
    relative = np.abs(got.astype(np.float64) / np.exp2(values.astype(np.float64)) - 1)
    assert relative.max() < 1.3e-7
    assert got[-1] == 1.0

    extremes = np.array([-np.inf, -1e30, -200, -127.5] * 4, np.float32)
    got = np.ones_like(extremes)
    exp2(extremes, got)
    assert (got == 0).all()
