"""vLLM's own rotary objects: a key that is moved is the key that they write there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from vllm_evict.config import EvictionConfigError
from vllm_evict.engine.positions import RotaryPositions, check_keys_turn, rotations_of
from vllm_evict.positions.rotary import Rotation

POSITIONS = 1024
KINDS = {
    "default": {"rope_type": "default"},
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.25},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "ntk": {"rope_type": "ntk", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "dynamic, trained on fewer": {"rope_type": "dynamic", "factor": 4.0, "max_trained_positions": 256},
    "dynamic, alpha": {"rope_type": "dynamic", "alpha": 8.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
}
REFUSED = {
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 32,
        "long_factor": [2.0] * 32,
        "original_max_position_embeddings": 256,
    },
    "M-RoPE": {"rope_type": "default", "mrope_section": [8, 12, 12]},
}


class Attention(nn.Module):
    """What stands beside a rotary embedding in a model."""

    def __init__(self, rotary: nn.Module | None) -> None:
        super().__init__()
        if rotary is not None:
            self.rotary_emb = rotary
        self.attn = nn.Identity()


def rope(parameters: dict, neox: bool = True, dtype: torch.dtype = torch.float32) -> nn.Module:
    config = VllmConfig()
    config.model_config = SimpleNamespace(max_model_len=POSITIONS)  # LongRoPE asks for it
    with set_current_vllm_config(config):
        return get_rope(64, POSITIONS, neox, {"rope_theta": 10_000.0} | parameters, dtype=dtype)


def rotation_beside(rotary: nn.Module | None) -> Rotation:
    model = Attention(rotary)
    return rotations_of(model, {"layer": model.attn}, POSITIONS)["layer"]


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("kind", KINDS)
def test_moved_is_written_there(kind, neox):
    rotary = rope(KINDS[kind], neox)
    rotation = rotation_beside(rotary)
    keys = torch.randn(32, 2 * 64, generator=torch.Generator().manual_seed(0))
    written = lambda first: rotary.forward_native(torch.arange(first, first + 32), keys.clone(), keys.clone())[1]  # noqa: E731
    held = written(POSITIONS - 32).view(32, 2, 64)
    for down in (1, 31, 200, 500):  # rebase after rebase
        held = rotation.move(held, torch.tensor(down))
    torch.testing.assert_close(held, written(POSITIONS - 32 - 732).view(32, 2, 64), atol=5e-4, rtol=0)


def test_a_table_in_bf16_is_not_taken_over():
    exact, rounded = (rotation_beside(rope(KINDS["default"], dtype=dtype)) for dtype in (torch.float32, torch.bfloat16))
    assert exact.inv_freq.equal(rounded.inv_freq)


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_name(kind):
    with pytest.raises(EvictionConfigError, match="rebase does not work with") as error:
        rotation_beside(rope(REFUSED[kind]))
    assert ("M-RoPE" if kind == "M-RoPE" else "LongRoPE") in str(error.value)


def test_a_model_without_rotary_positions_is_refused():
    with pytest.raises(EvictionConfigError, match="positions of layer layer: no rotary embedding"):
        rotation_beside(None)


def test_a_table_shorter_than_the_model_is_refused():
    model = Attention(rope(KINDS["default"]))
    with pytest.raises(EvictionConfigError, match="its table has 1024 positions, the model 2048"):
        rotations_of(model, {"layer": model.attn}, 2048)


# ---- the proof on the loaded model ----


class Layer:
    def __init__(self, key_at) -> None:
        self.key_at, self.impl = key_at, type("Impl", (), {})()


def check(key_at) -> None:
    """`key_at(positions)`: keys `[n, 1, 64]` that the model makes."""
    layer = Layer(key_at)

    def run_at(num_tokens: int, first: int) -> None:
        key = key_at(torch.arange(first, first + num_tokens))
        layer.impl.forward(layer, None, key, None, None, None, torch.empty(1))

    rotation = rotation_beside(rope(KINDS["default"]))
    check_keys_turn(run_at, {"layer 0": layer}, {"layer 0": rotation}, POSITIONS)
    assert not hasattr(layer.impl, "forward")


def test_what_is_proven():
    rotary = rope(KINDS["default"])
    keys = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    turned = lambda positions: rotary.forward_native(positions, keys.clone(), keys.clone())[1].view(8, 1, 64)  # noqa: E731
    check(turned)
    check(lambda positions: turned(positions).bfloat16())
    weights = torch.linspace(0.5, 2, 64)
    for key_at in (
        lambda positions: keys.view(8, 1, 64),  # a layer without positions
        lambda positions: turned(positions) * weights,  # a norm after the rotation
        lambda positions: turned(positions) + positions[:, None, None] / POSITIONS,  # learned positions besides
    ):
        with pytest.raises(EvictionConfigError, match="layer 0: its keys do not turn"):
            check(key_at)


# ---- the positions of a step ----


class Request:
    def __init__(self, offset_pages: int, num_scheduled_tokens: int) -> None:
        self.offset_pages, self.num_scheduled_tokens = offset_pages, num_scheduled_tokens


def test_positions_are_lowered_request_by_request():
    lower = RotaryPositions(32, [], torch.device("cpu")).lower
    positions = torch.tensor([900, 901, 902, 7, 640, 0, 0])  # two of padding
    lower(positions, [Request(20, 3), Request(0, 1), Request(19, 1)])
    assert positions.tolist() == [260, 261, 262, 7, 32, 0, 0]
    lower(positions, [Request(0, 3), Request(0, 1), Request(0, 1)])
    assert positions.tolist() == [260, 261, 262, 7, 32, 0, 0]
