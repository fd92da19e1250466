"""Moving keys: rotate-then-attend equals write-at-the-new-position-then-attend, and what many moves cost in bf16."""

from __future__ import annotations

import pytest
import torch

from vllm_evict.positions.pages import PackedKeyPages, PlainKeyPages, move_pages
from vllm_evict.positions.rotary import Rotation
from vllm_evict.scores.cpu_layout import KeyLayout

HEAD_SIZE = 64
POSITIONS = 512


def inv_freq(rotary_dim: int = HEAD_SIZE, base: float = 10_000.0) -> torch.Tensor:
    return base ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)


def table(frequencies: torch.Tensor, scale: float = 1.0, positions: int = POSITIONS) -> torch.Tensor:
    """As vLLM makes it: float32 from the start."""
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies.float()
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * scale


def written_at(keys: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The definition, pair by pair: `keys` `[n, heads, head size]` at `positions` `[n]`."""
    half = cos_sin.shape[1] // 2
    out = keys.clone()
    for i in range(half):
        one, two = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        cos, sin = cos_sin[positions, i, None], cos_sin[positions, half + i, None]
        out[..., one] = keys[..., one] * cos - keys[..., two] * sin
        out[..., two] = keys[..., two] * cos + keys[..., one] * sin
    return out


KINDS = {
    "neox": (inv_freq(), 1.0, False),
    "interleaved": (inv_freq(), 1.0, True),
    "partial": (inv_freq(32), 1.0, False),
    "partial-interleaved": (inv_freq(32), 1.0, True),
    "linear": (inv_freq() / 4, 1.0, False),
    "base": (inv_freq(base=1e6), 1.0, False),
    "mscale": (inv_freq(), 1.2079, False),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


def test_frequencies_are_read_off_the_table(kind):
    frequencies, scale, interleaved = kind
    rotation = Rotation.of_table(table(frequencies, scale), interleaved)
    torch.testing.assert_close(rotation.inv_freq, frequencies, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("positions", [8192, 131_072])
def test_frequencies_are_read_off_a_long_table(positions):
    rotation = Rotation.of_table(table(inv_freq(base=1e5), positions=positions), interleaved=False)
    assert ((rotation.inv_freq - inv_freq(base=1e5)).abs() * positions).max() < 4 * positions * 2**-24


def test_a_table_that_is_no_straight_line_is_refused():
    """Frequencies that switch half-way, as LongRoPE's do, or a length that changes."""
    switched = torch.cat([table(inv_freq())[:256], table(inv_freq() / 3)[256:]])
    growing = table(inv_freq()) * torch.linspace(1, 2, POSITIONS)[:, None]
    for bad in (switched, growing):
        with pytest.raises(ValueError, match="in proportion to the position"):
            Rotation.of_table(bad, interleaved=False)


def test_moved_then_attended_is_written_there_then_attended(kind):
    """Attention over 256 keys that moved down, five times in a row, by a different distance each page of 32."""
    frequencies, scale, interleaved = kind
    cos_sin = table(frequencies, scale)
    rotation = Rotation.of_table(cos_sin, interleaved)
    generator = torch.Generator().manual_seed(0)
    keys, queries = (torch.randn(256, 2, HEAD_SIZE, generator=generator) for _ in range(2))
    values = torch.randn(256, 2, HEAD_SIZE, generator=generator)
    positions = torch.arange(256) + 5 * 40
    held = written_at(keys, positions, cos_sin, interleaved)
    for step in range(5):
        down = torch.randint(0, 9, (8,), generator=generator).repeat_interleave(32) + 8 * step
        held = rotation.move(held, down[:, None])
        positions = positions - down
    assert positions.min() >= 0
    written = written_at(keys, positions, cos_sin, interleaved)

    def attend(k: torch.Tensor) -> torch.Tensor:
        q = written_at(queries, positions, cos_sin, interleaved).transpose(0, 1)
        weights = (q @ k.permute(1, 2, 0) / HEAD_SIZE**0.5).softmax(dim=-1)
        return weights @ values.transpose(0, 1)

    # float32 tables are off by a ten-thousandth of a radian at position 500 themselves.
    torch.testing.assert_close(held, written, atol=2e-4, rtol=0)
    torch.testing.assert_close(attend(held), attend(written), atol=1e-5, rtol=1e-5)


def test_moving_there_and_back_changes_nothing():
    rotation = Rotation(inv_freq(), interleaved=False)
    keys = torch.randn(7, 2, HEAD_SIZE, generator=torch.Generator().manual_seed(1))
    for distance in (1, 4096, 1_000_000):
        down = torch.full((7, 1), distance)
        torch.testing.assert_close(rotation.move(rotation.move(keys, down), -down), keys, atol=1e-5, rtol=0)
    assert rotation.move(keys, torch.zeros(7, 1)).equal(keys)


def test_drift_of_a_hundred_moves_in_bf16():
    """Each move rounds to bf16 again; errors add up like a random walk. docs/endless.md quotes this number."""
    rotation = Rotation(inv_freq(), interleaved=False)
    keys = torch.randn(1024, 2, HEAD_SIZE, generator=torch.Generator().manual_seed(2))
    held, total = keys.bfloat16(), 0
    for step in range(100):
        held = rotation.move(held, torch.full((1024, 1), 37 + step))
        total += 37 + step
    exact = rotation.move(keys, torch.full((1024, 1), total))
    once = keys.bfloat16().float() - keys
    drift = (held.float() - exact).norm() / keys.norm()
    print(f"bf16: {drift:.4f} of a key's length after 100 moves, {once.norm() / keys.norm():.4f} after rounding once")
    assert drift < 0.02


@pytest.mark.parametrize("interleave", [1, 2, HEAD_SIZE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_in_a_cache(interleave, dtype):
    """Packed as vLLM packs them; other pages and the values stay as they are."""
    rotation, layout = Rotation(inv_freq(), interleaved=False), KeyLayout(32, HEAD_SIZE, 32, interleave)
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(6, 2, 32, HEAD_SIZE, generator=generator).to(dtype)  # [blocks, KV heads, tokens, head size]
    cache = torch.zeros(6, 2, 64, HEAD_SIZE, dtype=dtype)
    cache[:, :, 32:] = torch.randn(6, 2, 32, HEAD_SIZE, generator=generator).to(dtype)
    before = cache.clone()
    pages = PackedKeyPages(cache, cache[:, :, :32], layout)
    pages.write(torch.arange(6), keys)
    assert pages.read(torch.arange(6)).equal(keys)
    _check_copy_and_move(pages, rotation, keys)
    assert cache[[0, 2, 3, 4, 5], :, 32:].equal(before[[0, 2, 3, 4, 5], :, 32:])
    assert cache[1, :, 32:].equal(before[4, :, 32:])  # a copy takes the values along


def test_pages_in_a_plain_cache():
    rotation = Rotation(inv_freq(), interleaved=False)
    keys = torch.randn(6, 2, 32, HEAD_SIZE, generator=torch.Generator().manual_seed(3))
    cache = torch.zeros(6, 32, 2, 2 * HEAD_SIZE).transpose(1, 2)
    cache[..., :HEAD_SIZE] = keys
    _check_copy_and_move(PlainKeyPages(cache, cache[..., :HEAD_SIZE]), rotation, keys)


def _check_copy_and_move(pages, rotation: Rotation, keys: torch.Tensor) -> None:
    pages.copy(torch.tensor([4]), torch.tensor([1]))
    assert pages.read(torch.tensor([1])).equal(keys[4:5])
    move_pages(pages, rotation, torch.tensor([5, 1]), torch.tensor([64, 32]))
    moved = rotation.move(keys[[5, 4]], torch.tensor([64, 32])[:, None, None])
    assert pages.read(torch.tensor([5, 1])).equal(moved)
    assert pages.read(torch.tensor([0, 2, 3, 4])).equal(keys[[0, 2, 3, 4]])
