"""Attention and page mass in one pass, against slow references, under Triton's interpreter."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="no Triton here")

from tests.triton.batch import DECODE_CASES, UNTOUCHED, DecodeStep, make_decode_step
from tests.triton.interpreter import interpreted


@pytest.fixture(scope="module")
def kernels():
    with interpreted("triton_decode") as module, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MIN_TILES_PER_PROGRAM", 2)  # so that short rows have several programs of several tiles
        yield module


def decode(kernels, step: DecodeStep, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, page mass)"""
    output, page_mass = torch.full_like(step.query, float("nan")), step.start()
    kernels.decode_with_page_mass(**step.arguments(), output=output, page_mass=page_mass, **options)
    return output, page_mass


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert got.shape == expected.shape and not torch.isnan(got).any()
    return (got.double() - expected.double()).abs().max().item()


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# --- the numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", DECODE_CASES)
def test_matches_reference(kernels, case):
    step = make_decode_step(lengths=(1, 33, 0, 64, 197), **DECODE_CASES[case])
    output, page_mass = decode(kernels, step)
    assert error(output, step.expected_output()) <= step.output_bound()
    assert error(page_mass, step.expected_mass()) <= step.mass_bound()


@pytest.fixture(scope="module")
def step() -> DecodeStep:
    return make_decode_step(lengths=(1, 150, 0, 64, 97), heads=6, kv_heads=2, softcap=20.0, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def expected(kernels, step) -> tuple[torch.Tensor, torch.Tensor]:
    return decode(kernels, step)


def test_by_hand(kernels):
    """Keys are unit vectors, so a logit is one number of the query: 1/8, 2/8, 5/8 as in reference.py."""
    keys = torch.full((2, 2, 1, 16), float("nan"))  # pages of 2 tokens
    keys[1, :, 0] = torch.eye(16)[:2]
    keys[0, 0, 0] = torch.eye(16)[2]
    query = torch.zeros(1, 1, 16)
    query[0, 0, :3] = torch.tensor([1.0, 2.0, 5.0]).log()
    output, page_mass = torch.zeros(1, 1, 16), torch.zeros(1, 2)
    kernels.decode_with_page_mass(
        query=query,
        key_cache=keys,
        value_cache=8 * keys,
        block_table=int32(1, 0)[None],
        num_tokens=int32(3),
        output=output,
        row=int32(0),
        visible_tokens=int32(3),
        page_mass=page_mass,
        scale=1.0,
        weight=1.0,
    )
    assert page_mass.tolist() == [[pytest.approx(3 / 8), pytest.approx(5 / 8)]]
    assert output[0, 0].tolist() == pytest.approx([1, 2, 5] + 13 * [0])


@pytest.mark.parametrize("fault", ["one token fewer", "pages swapped", "scale", "no soft cap", "heads reversed"])
def test_the_bounds_tell_faults_from_rounding(kernels, fault):
    step = make_decode_step(lengths=(97,), heads=6, kv_heads=2, softcap=5.0)
    wrong = {
        "one token fewer": replace(step, num_tokens=int32(96), visible_tokens=int32(96)),
        "pages swapped": replace(step, block_table=step.block_table[:, [1, 0, 2, 3, 4, 6, 5, 7, 8]]),
        "scale": replace(step, scale=step.scale * 1.01),
        "no soft cap": replace(step, softcap=0.0),
        "heads reversed": replace(step, query=step.query.flip(1)),
    }[fault]
    output, page_mass = decode(kernels, replace(wrong, key_cache=torch.nan_to_num(step.key_cache),
                                                value_cache=torch.nan_to_num(step.value_cache)))  # fmt: skip
    assert error(output, step.expected_output()) > 100 * step.output_bound()
    assert error(page_mass, step.expected_mass()) > 100 * step.mass_bound()


# --- what must not matter -------------------------------------------------------------------------


def same(got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return all(map(torch.equal, got, expected))


def test_two_runs_are_equal_to_the_bit(kernels, step, expected):
    assert same(decode(kernels, step), expected)


def test_garbage_nobody_wrote_does_not_matter(kernels, step, expected):
    assert torch.isnan(step.key_cache).any() and torch.isnan(step.value_cache).any()
    other = [torch.nan_to_num(cache, nan=1e4) for cache in (step.key_cache, step.value_cache)]
    assert same(decode(kernels, replace(step, key_cache=other[0], value_cache=other[1])), expected)


@pytest.mark.parametrize("least_tiles", [1, 64])
def test_the_number_of_splits_does_not_change_a_bit_of_the_mass(kernels, step, expected, least_tiles, monkeypatch):
    monkeypatch.setattr(kernels, "MIN_TILES_PER_PROGRAM", least_tiles)
    monkeypatch.setattr(kernels, "BLOCK_ROWS", 2)
    monkeypatch.setattr(kernels, "LIST_BLOCK", 2)
    output, page_mass = decode(kernels, step)
    assert torch.equal(page_mass, expected[1])
    assert error(output, step.expected_output()) <= step.output_bound()


def test_company_does_not_matter(kernels, step, expected):
    """Alone, and with a table no wider than the row needs."""
    alone = replace(
        step,
        query=step.query[4:],
        block_table=step.block_table[4:, :7].contiguous(),
        num_tokens=step.num_tokens[4:].clone(),
        row=int32(0),
        visible_tokens=int32(97),
    )
    output, page_mass = decode(kernels, alone)
    assert torch.equal(page_mass[0], expected[1][4, :7])
    assert error(output, step.expected_output()[4:]) <= step.output_bound()


def test_who_is_observed_does_not_matter_to_the_output(kernels, step, expected):
    """As persistent buffers have it: some rows, in any order, beside places of nobody that name anybody."""
    chosen = replace(step, row=int32(4, 4, -1, 1, 2**30), visible_tokens=int32(97, 0, 0, 150, 0))
    output, page_mass = decode(kernels, chosen)
    assert torch.equal(output, expected[0])
    assert torch.equal(page_mass[[0, 3]], expected[1][[4, 1]])
    assert (page_mass[[1, 2, 4]] == UNTOUCHED).all()
    output, page_mass = decode(kernels, replace(step, row=int32(), visible_tokens=int32()))
    assert torch.equal(output, expected[0]) and page_mass.shape == (0, 12)


def test_the_gate_is_the_mass_s_alone(kernels, step, expected):
    scratch = torch.full((20_000,), float("nan"))
    output, page_mass = decode(kernels, step, enabled=int32(0), scratch=scratch)
    assert torch.equal(output, expected[0]) and (page_mass == UNTOUCHED).all()
    # Of parts of a row (rows of 1, 3, 0, 1 and 2 tiles have 1, 2, 0, 1 and 1): head, peak, total. No sums, no peaks.
    assert (~torch.isnan(scratch)).sum() == 5 * 6 * (64 + 2)
    assert same(decode(kernels, step, enabled=int32(1)), expected)


def test_scratch_of_the_size_told_and_wider_results(kernels, step, expected):
    elements = kernels.decode_scratch(
        num_rows=5, num_observed=5, num_heads=6, num_kv_heads=2, head_size=64, max_pages=12, page_tokens=16,
        element_bytes=2,
    )  # fmt: skip
    scratch = torch.full((elements,), float("nan"))
    output, page_mass = torch.full((5, 8, 96), UNTOUCHED, dtype=torch.bfloat16), torch.full((5, 15), UNTOUCHED)
    kernels.decode_with_page_mass(**step.arguments(), output=output[:, :6, :64], page_mass=page_mass, scratch=scratch)
    assert torch.equal(output[:, :6, :64], expected[0]) and torch.equal(page_mass[:, :12], expected[1])
    assert (output[:, 6:] == UNTOUCHED).all() and (output[..., 64:] == UNTOUCHED).all()
    assert (page_mass[:, 12:] == UNTOUCHED).all()
    with pytest.raises(ValueError, match=f"holds {elements - 1} elements, {elements} are needed"):
        decode(kernels, step, scratch=scratch[1:])


def test_a_batch_of_nobody(kernels, step):
    nobody = replace(step, num_tokens=int32(0, 0, 0, 0, 0), visible_tokens=int32(0, 0, 0, 0, 0))
    output, page_mass = decode(kernels, nobody)
    assert (output == 0).all() and (page_mass == UNTOUCHED).all()


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {"key_cache": s.key_cache.to(torch.float8_e5m2)}, "key_cache is torch.float8_e5m2"),
        (lambda s: {"value_cache": s.value_cache.float()}, "value_cache torch.float32"),
        (lambda s: {"value_cache": s.value_cache[:, :8]}, "value_cache has shape"),
        (lambda s: {"value_cache": s.value_cache[..., ::2]}, "value_cache has shape"),
        (lambda s: {"query": s.query[..., :32]}, "query has shape"),
        (lambda s: {"query": s.query[:3], "output": s.query[:3]}, "block_table has 5 rows for 3 queries"),
        (lambda s: {"output": s.query.float()}, "output must be torch.bfloat16"),
        (lambda s: {"output": s.query[:, :3]}, "output must be"),
        (lambda s: {"num_tokens": s.num_tokens.long()}, "num_tokens must be contiguous int32"),
        (lambda s: {"row": s.row[:3]}, "page_mass has shape"),
        (lambda s: {"visible_tokens": s.visible_tokens[:3]}, r"visible_tokens must be contiguous int32 \[5\]"),
        (lambda s: {"page_mass": s.start()[:, :5]}, "page_mass has shape"),
        (lambda s: {"enabled": int32(1, 1)}, "enabled must be"),
        (lambda s: {"scratch": torch.empty(9, 9)}, "scratch must be"),
    ],
)
def test_wrong_arguments_are_refused(kernels, step, change, message):
    arguments = step.arguments() | {"output": torch.empty_like(step.query), "page_mass": step.start()}
    with pytest.raises(ValueError, match=message):
        kernels.decode_with_page_mass(**(arguments | change(step)))


def test_a_page_larger_than_a_program_holds_is_refused(kernels):
    step = make_decode_step(lengths=(5,), page=128, heads=1, kv_heads=1, head_size=256, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"take 65536 bytes .* at most 32768 are supported: lower --block-size"):
        decode(kernels, step)
