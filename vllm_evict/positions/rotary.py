"""Move keys that are already rotated: by how far they go, not by where they were.

A rotary key of position p is R(p) k, a rotation of pairs of dimensions by the angles p * inv_freq. Rotations compose,
R(-d) R(p) k = R(p - d) k, so a key in the cache moves down by d positions without anybody knowing k or p.

Based on RoPE (arXiv 2104.09864), and on positions inside the cache (StreamingLLM, arXiv 2309.17453).
Differs from the latter: keys are moved once per several thousand tokens, not at every step.

Needs torch, never vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_ANGLE_TOLERANCE = 1e-3
"""Radians that a table's angle may be off, besides what float32 loses of a large one."""


@dataclass(frozen=True)
class Rotation:
    """How a layer's keys turn with their position.

    Args:
        inv_freq: float64 ``[rotary_dim / 2]``, radians per position of each pair of dimensions.
        interleaved: whether pairs are dims ``(2i, 2i + 1)`` (GPT-J); else ``(i, i + rotary_dim / 2)`` (NeoX).

    """

    inv_freq: torch.Tensor
    interleaved: bool

    @classmethod
    def of_table(cls, cos_sin: torch.Tensor, interleaved: bool) -> Rotation:
        """Read the frequencies off a table of cosines and sines.

        A factor on the whole table (YaRN's ``mscale``) is in the keys already and takes no part.

        Args:
            cos_sin: float32 ``[positions, rotary_dim]``, cosines in the first half, sines in the second.
            interleaved: see :class:`Rotation`.

        Raises:
            ValueError: its angles do not grow in proportion to the position (frequencies that switch with the length,
                mixtures of frequencies), so keys cannot be moved.

        """
        cos, sin = cos_sin.double().chunk(2, dim=-1)
        angle, length = torch.atan2(sin, cos), torch.hypot(cos, sin)
        last = len(angle) - 1
        # The first step tells the frequency to seven digits; each longer one, of double the length, tells one bit more.
        inv_freq, position = angle[1], 2
        while position <= last:
            turns = torch.round((inv_freq * position - angle[position]) / (2 * torch.pi))
            inv_freq, position = (angle[position] + turns * 2 * torch.pi) / position, 2 * position
        positions = torch.arange(len(angle), dtype=torch.float64, device=angle.device)
        off = torch.remainder(positions[:, None] * inv_freq - angle + torch.pi, 2 * torch.pi) - torch.pi
        rounding = positions[:, None] * inv_freq.abs() * 2**-23  # the table's angles were float32
        straight = (off.abs() <= 4 * rounding + _ANGLE_TOLERANCE).all()
        if not (straight and torch.allclose(length, length[0].expand_as(length), rtol=1e-4)):
            raise ValueError("the angles of its table do not grow in proportion to the position")
        return cls(inv_freq, interleaved)

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of a head that turn; the others carry no position."""
        return 2 * len(self.inv_freq)

    def move(self, keys: torch.Tensor, positions_down: torch.Tensor) -> torch.Tensor:
        """Keys, each moved down.

        Args:
            keys: ``[..., head_size]``, any floating dtype; computed in float32.
            positions_down: whole numbers, of a shape that broadcasts over ``keys`` without its last dimension.
                Negative = up.

        Returns:
            A new tensor of the same shape and dtype.

        """
        angle = -positions_down.double()[..., None] * self.inv_freq.to(keys.device)
        cos, sin = angle.cos().float(), angle.sin().float()
        turned = keys[..., : self.rotary_dim].float()
        if self.interleaved:
            first, second = turned[..., 0::2], turned[..., 1::2]
        else:
            first, second = turned.chunk(2, dim=-1)
        pair = (first * cos - second * sin, second * cos + first * sin)
        turned = torch.stack(pair, dim=-1).flatten(-2) if self.interleaved else torch.cat(pair, dim=-1)
        return torch.cat([turned.to(keys.dtype), keys[..., self.rotary_dim :]], dim=-1)
