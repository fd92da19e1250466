"""The Triton kernels against the slow reference, under Triton's interpreter."""

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vllm_evict.scores.reference import key_difference_reference

pytest.importorskip("triton", reason="no Triton here")

from tests.triton.batch import CASES, KEY_CASES, UNTOUCHED, Batch, make_batch
from tests.triton.interpreter import interpreted

ROOT = Path(__file__).parents[2]
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def kernels():
    with interpreted() as module:
        yield module


def page_mass(kernels, batch: Batch, **options) -> torch.Tensor:
    result = batch.start()
    kernels.add_page_mass(**batch.arguments(), page_mass=result, **options)
    return result


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert got.shape == expected.shape and not torch.isnan(got).any()
    return (got.double() - expected.double()).abs().max().item()


# --- page mass: the numbers -----------------------------------------------------------------------

ROWS = ((1, 1), (33, 3), (64, 1), (97, 1), (75, 5))


@pytest.mark.parametrize("case", CASES)
def test_matches_reference(kernels, case):
    batch = make_batch(requests=ROWS, **CASES[case])
    expected = batch.reference()
    assert error(page_mass(kernels, batch), expected) <= batch.bound()
    assert error(page_mass(kernels, batch, log_sum_exp=batch.log_sum_exp()), expected) <= batch.bound()


@pytest.fixture(scope="module")
def batch() -> Batch:
    return make_batch(dtype=BF16, softcap=20.0, requests=((1, 1), (33, 3), (64, 1), (97, 4)))


@pytest.fixture(scope="module")
def expected(kernels, batch) -> torch.Tensor:
    return page_mass(kernels, batch)


def test_each_query_spreads_weight_times_heads_over_its_visible_pages_only(batch, expected):
    mass = expected - UNTOUCHED
    for i, pages in enumerate(-(-batch.visible_tokens // 16)):
        assert mass[i, :pages].sum().item() == pytest.approx(0.5 * 6, rel=1e-5)
        assert (mass[i, :pages] > 0).all()
        assert (mass[i, pages:] == 0).all()


def test_by_hand(kernels):
    """Keys are unit vectors, so a logit is one number of the query: 1/8, 2/8, 5/8 as in reference.py."""
    keys = torch.full((2, 2, 1, 16), float("nan"))  # pages of 2 tokens
    keys[1, :, 0] = torch.eye(16)[:2]
    keys[0, 0, 0] = torch.eye(16)[2]
    query = torch.zeros(1, 1, 16)
    query[0, 0, :3] = torch.tensor([1.0, 2.0, 5.0]).log()
    result = torch.zeros(1, 2)
    kernels.add_page_mass(
        query=query,
        key_cache=keys,
        block_table=torch.tensor([[1, 0]], dtype=torch.int32),
        token=torch.tensor([0], dtype=torch.int32),
        row=torch.tensor([0], dtype=torch.int32),
        visible_tokens=torch.tensor([3], dtype=torch.int32),
        page_mass=result,
        scale=1.0,
        weight=1.0,
    )
    assert result.tolist() == [[pytest.approx(3 / 8), pytest.approx(5 / 8)]]


@pytest.mark.parametrize("fault", ["one token fewer", "neighbour's pages", "next query", "scale", "heads reversed"])
def test_the_bound_tells_faults_from_rounding(kernels, batch, fault):
    chosen = torch.arange(5, 9)  # of the row with 97 tokens
    expected = batch.only(chosen).reference()
    wrong = {
        "one token fewer": replace(batch, visible_tokens=batch.visible_tokens - 1),
        "neighbour's pages": replace(batch, block_table=batch.block_table[:, [0, 2, 1, 3, 4, 5, 6, 7, 8]]),
        "next query": replace(batch, token=batch.token - 1),
        "scale": replace(batch, scale=batch.scale * 1.01),
        "heads reversed": replace(batch, query=batch.query.flip(1)),
    }[fault]
    assert error(page_mass(kernels, wrong.only(chosen)), expected) > 100 * batch.bound()


# --- page mass: what must not matter --------------------------------------------------------------


def test_garbage_nobody_wrote_does_not_matter(kernels, batch, expected):
    other = replace(batch, key_cache=torch.nan_to_num(batch.key_cache, nan=1e4))
    assert not torch.isnan(other.key_cache).any() and torch.isnan(batch.key_cache).any()
    assert torch.equal(page_mass(kernels, other), expected)


@pytest.mark.parametrize("has_log_sum_exp", [False, True])
def test_garbage_beyond_the_visible_tokens_does_not_matter(kernels, batch, has_log_sum_exp):
    """A query inside a chunk shares pages with keys written after it; one of its company sees them."""
    options = {"log_sum_exp": batch.log_sum_exp()} if has_log_sum_exp else {}
    early = replace(batch, visible_tokens=torch.where(batch.row == 3, batch.visible_tokens - 40, batch.visible_tokens))
    before = page_mass(kernels, early.only(torch.arange(8)), **options)
    keys = batch.key_cache.clone()
    keys[batch.block_table[3, 3], 8:] = float("nan")  # tokens 56..: seen by the last query of row 3 only, 57 tokens
    assert torch.equal(page_mass(kernels, replace(early, key_cache=keys), **options)[:8], before)


@pytest.mark.parametrize(("tile_queries", "tiles_per_program"), [(1, 1), (64, 1), (64, 2)])
def test_division_of_work_does_not_matter(kernels, batch, expected, tile_queries, tiles_per_program, monkeypatch):
    monkeypatch.setattr(kernels, "FULL_GRID", 1)
    monkeypatch.setattr(kernels, "MAX_TILES_PER_PROGRAM", tiles_per_program)
    for name in ("BLOCK", "NORMALISER_BLOCK", "BLOCK_ROWS"):
        monkeypatch.setattr(kernels, name, 4)
    got = page_mass(kernels, batch, queries_per_row=tile_queries)
    # The interpreter's matrix product rounds differently for other numbers of lines.
    assert error(got, expected) <= batch.bound()


def test_two_runs_are_equal_to_the_bit(kernels, batch, expected):
    assert torch.equal(page_mass(kernels, batch), expected)


def test_size_of_scratch_does_not_matter(kernels, batch, expected):
    sizes = dict(num_heads=6, num_kv_heads=2, max_pages=9, page_tokens=16, has_log_sum_exp=False)
    whole = kernels.page_mass_scratch(num_observed=9, **sizes)
    for elements in (whole, kernels.page_mass_scratch(num_observed=5, **sizes) + 3):
        scratch = torch.full((elements,), float("nan"))
        assert error(page_mass(kernels, batch, scratch=scratch), expected) <= batch.bound()
    with pytest.raises(ValueError, match=f"at least {whole // 9} are needed"):
        page_mass(kernels, batch, scratch=torch.empty(whole // 9 - 1))


def test_scratch_of_log_sum_exp(kernels, batch, expected):
    sizes = dict(num_heads=6, num_kv_heads=2, max_pages=9, page_tokens=16, has_log_sum_exp=True)
    scratch = torch.full((kernels.page_mass_scratch(num_observed=9, **sizes),), float("nan"))
    assert error(page_mass(kernels, batch, scratch=scratch, log_sum_exp=batch.log_sum_exp()), expected) <= batch.bound()


def test_skipped_queries(kernels, batch, expected):
    """As a CUDA graph has them: more places than queries."""
    visible, row, token = batch.visible_tokens.clone(), batch.row.clone(), batch.token.clone()
    skipped, kept = torch.tensor([1, 4, 6, 8]), torch.tensor([0, 2, 3, 5, 7])
    visible[skipped] = 0
    row[torch.tensor([4, 8])] = -1
    token[skipped] = -(2**30)
    got = page_mass(kernels, replace(batch, visible_tokens=visible, row=row, token=token))
    assert (got[skipped] == UNTOUCHED).all()
    assert error(got[kept], expected[kept]) <= batch.bound()
    assert page_mass(kernels, batch.only(torch.arange(0))).shape == (0, 9)


def test_rows_in_any_order(kernels, batch, expected):
    order = torch.tensor([7, 0, 8, 4, 1, 5, 2, 3, 6])
    assert error(page_mass(kernels, batch.only(order)), expected[order]) <= batch.bound()


def test_warming_up_leaves_nothing_to_see(kernels, batch, expected):
    for has_log_sum_exp in (False, True):
        kernels.warm_up(
            query_dtype=BF16, num_heads=6, key_cache=batch.key_cache, softcap=20.0, has_log_sum_exp=has_log_sum_exp
        )
    assert torch.equal(page_mass(kernels, batch), expected)


def test_a_wider_page_mass_is_left_alone_at_the_end(kernels, batch, expected):
    result = torch.full((9, 12), UNTOUCHED)
    kernels.add_page_mass(**batch.arguments(), page_mass=result)
    assert torch.equal(result[:, :9], expected) and (result[:, 9:] == UNTOUCHED).all()


@pytest.mark.parametrize("has_log_sum_exp", [False, True])
def test_the_gate(kernels, batch, expected, has_log_sum_exp):
    options = {"log_sum_exp": batch.log_sum_exp()} if has_log_sum_exp else {}
    off, on = torch.tensor([0], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    assert (page_mass(kernels, batch, enabled=off, **options) == UNTOUCHED).all()
    assert error(page_mass(kernels, batch, enabled=on, **options), expected) <= batch.bound()


# --- page mass: refusals --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: {"key_cache": b.key_cache.float()}, "key_cache torch.float32"),
        (lambda b: {"key_cache": b.key_cache.view(torch.uint8)}, "torch.uint8"),
        (lambda b: {"key_cache": b.key_cache[:, :12]}, "page of 12 tokens"),
        (lambda b: {"key_cache": b.key_cache[..., ::2]}, "contiguous heads"),
        (lambda b: {"query": b.query[..., :32]}, "query has shape"),
        (lambda b: {"query": b.query[:, :5]}, "no multiple"),
        (lambda b: {"row": b.row.long()}, "row must be contiguous int32"),
        (lambda b: {"token": b.token[:3]}, r"row must be contiguous int32 \[3\]"),
        (lambda b: {"block_table": b.block_table.long()}, "block_table must be int32"),
        (lambda b: {"page_mass": b.start().double()}, "page_mass must be float32"),
        (lambda b: {"page_mass": b.start()[:, :5]}, "page_mass has shape"),
        (lambda b: {"log_sum_exp": torch.zeros(3, 6)}, "log_sum_exp must be"),
        (lambda b: {"k_scale": torch.ones(6)}, "k_scale must be"),
        (lambda b: {"enabled": torch.ones(2, dtype=torch.int32)}, "enabled must be"),
        (lambda b: {"scratch": torch.empty(9, 9)}, "scratch must be"),
    ],
)
def test_wrong_arguments_are_refused(kernels, batch, change, message):
    with pytest.raises(ValueError, match=message):
        kernels.add_page_mass(**(batch.arguments() | {"page_mass": batch.start()} | change(batch)))


# --- key difference -------------------------------------------------------------------------------

NUM_TOKENS = (1, 33, 0, 97, 130)


def key_difference(kernels, batch: Batch, **options) -> torch.Tensor:
    result = torch.full(batch.block_table.shape, UNTOUCHED)
    kernels.add_key_difference(
        key_cache=batch.key_cache,
        block_table=batch.block_table,
        num_tokens=torch.tensor(NUM_TOKENS, dtype=torch.int32),
        key_difference=result,
        weight=0.5,
        **options,
    )
    return result


def key_difference_expected(batch: Batch) -> torch.Tensor:
    result = torch.full(batch.block_table.shape, UNTOUCHED, dtype=torch.float64)
    key_difference_reference(
        key_cache=batch.keys(),
        block_table=batch.block_table,
        num_tokens=torch.tensor(NUM_TOKENS),
        key_difference=result,
        weight=0.5,
        compute_dtype=torch.float64,
    )
    return result


def key_batch(**case) -> Batch:
    return make_batch(heads=case["kv_heads"], requests=tuple((max(1, n), 1) for n in NUM_TOKENS), **case)


@pytest.mark.parametrize("case", KEY_CASES)
def test_key_difference_matches_reference(kernels, case):
    batch = key_batch(**KEY_CASES[case])
    assert error(key_difference(kernels, batch), key_difference_expected(batch)) <= 2e-6 * batch.key_cache.shape[2]


def test_key_difference_of_zero_keys_of_scratch_and_of_a_closed_gate(kernels, monkeypatch):
    batch = key_batch(**KEY_CASES["bf16"])
    batch.key_cache[batch.block_table[1, 0], 3] = 0
    expected = key_difference_expected(batch)
    whole = key_difference(kernels, batch)
    assert error(whole, expected) <= 4e-6
    assert torch.equal(key_difference(kernels, batch), whole)
    sizes = dict(num_kv_heads=2, max_pages=batch.block_table.shape[1], page_tokens=16, head_size=64)
    scratch = torch.full((kernels.key_difference_scratch(num_rows=2, **sizes),), float("nan"))
    assert torch.equal(key_difference(kernels, batch, scratch=scratch), whole)
    assert (key_difference(kernels, batch, enabled=torch.tensor([0], dtype=torch.int32)) == UNTOUCHED).all()
    monkeypatch.setattr(kernels, "MAX_TILES_PER_PROGRAM", 1)
    monkeypatch.setattr(kernels, "BLOCK_ROWS", 2)
    assert error(key_difference(kernels, batch), expected) <= 4e-6


# --- rows of a batch ------------------------------------------------------------------------------


def test_gather_rows(kernels):
    def int32(*values):
        return torch.tensor(values, dtype=torch.int32)

    table = int32([7, 9, 5], [4, 99, 99], [99, 99, 99])
    out_table, out_lens = torch.full((5, 4), 55, dtype=torch.int32), torch.full((5,), 55, dtype=torch.int32)
    kernels.gather_rows(table, int32(1, -1, 0, 2), int32(33, 3, 0), out_table, out_lens, 16)
    assert out_table.tolist() == [[4, 0, 0, 0], [0, 0, 0, 0], [7, 9, 5, 0], [0, 0, 0, 0], [55, 55, 55, 55]]
    assert out_lens.tolist() == [3, 0, 33, 0, 55]
    with pytest.raises(ValueError, match="1 and 5 rows, 2 needed"):
        kernels.gather_rows(table, int32(0, 1), int32(33, 3, 0), out_table[:1], out_lens, 16)
    with pytest.raises(ValueError, match="out_table holds 2 pages, table 3"):
        kernels.gather_rows(table, int32(0, 1), int32(33, 3, 0), out_table[:, :2], out_lens, 16)


# --- the process ----------------------------------------------------------------------------------


def test_nothing_of_the_interpreter_stays_behind():
    """vLLM's CPU build must go on without Triton, and the modules that others import compile."""
    code = """
import os, sys
import torch
from tests.triton.interpreter import interpreted
from vllm_evict.scores import triton as compiled
from vllm_evict.bench.kernel_table import compile_for, variants

variant = next(v for v in variants() if v.kernel == "gather_row")
before = compile_for(variant, 90)
with interpreted() as module:
    assert module is not compiled
    row = torch.zeros(1, dtype=torch.int32)
    module.gather_rows(row[None], row, row, row[None], row.clone(), 16)
assert "TRITON_INTERPRET" not in os.environ
assert sys.modules["vllm_evict.scores.triton"] is compiled
os.environ["TRITON_CACHE_DIR"] += "/again"
assert compile_for(variant, 90) == before
"""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TRITON_CACHE_DIR": cache}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
