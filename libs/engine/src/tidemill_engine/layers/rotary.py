"""Rotary position embedding with the scalings that do not depend on a sequence's length."""

import math

import torch

from tidemill_engine.models.rope_config import RopeConfig


class RotaryTable:
    """cos and sin for each position, made once: [context, dim] float32."""

    def __init__(self, rope: RopeConfig, dim: int, context_tokens: int) -> None:
        frequencies, scale = inverse_frequencies(rope, dim)
        angles = torch.arange(context_tokens, dtype=torch.float32)[:, None] * frequencies
        angles = torch.cat([angles, angles], dim=-1)
        self.cos = angles.cos() * scale
        self.sin = angles.sin() * scale

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin as [tokens, 1, dim]."""
        return self.cos[positions][:, None], self.sin[positions][:, None]


class PairRotary:
    """Turns the last `dim` values of a head in pairs that lie beside each other, and leaves them there; angles are made
    for the positions at hand."""

    def __init__(self, rope: RopeConfig, dim: int) -> None:
        self.dim = dim
        self._frequencies, self._scale = inverse_frequencies(rope, dim)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin as [tokens, 1, dim / 2]."""
        angles = (positions[:, None].float() * self._frequencies)[:, None]
        return angles.cos() * self._scale, angles.sin() * self._scale

    def turn(self, heads: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """heads [tokens, heads, values]"""
        cos, sin = angles
        plain, turning = heads[..., : -self.dim], heads[..., -self.dim :]
        first, second = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return torch.cat([plain, turned.flatten(-2)], dim=-1)

    def turn_back(self, heads: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """By the opposite angles."""
        cos, sin = angles
        return self.turn(heads, (cos, -sin))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, dim], halves as in Hugging Face checkpoints."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def pairs_to_halves(x: torch.Tensor) -> torch.Tensor:
    """Values that turn together, from beside each other to half a head apart."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)


def inverse_frequencies(rope: RopeConfig, dim: int) -> tuple[torch.Tensor, float]:
    """[dim / 2] frequencies and the factor on cos and sin."""
    plain = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, plain, dim), _yarn_scale(rope)
    return plain, 1.0


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Long waves are stretched, short ones kept, those between blended."""
    low_wave = rope.original_context_tokens / rope.low_freq_factor
    high_wave = rope.original_context_tokens / rope.high_freq_factor
    waves = 2 * math.pi / plain
    kept = (rope.original_context_tokens / waves - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - kept) * plain / rope.factor + kept * plain
    stretched = torch.where(waves > low_wave, plain / rope.factor, plain)
    between = (waves >= high_wave) & (waves <= low_wave)
    return torch.where(between, blended, stretched)


def _yarn(rope: RopeConfig, plain: torch.Tensor, dim: int) -> torch.Tensor:
    def dim_of(rotations: float) -> float:
        length = rope.original_context_tokens / (rotations * 2 * math.pi)
        return dim * math.log(length) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return plain / rope.factor * (1 - kept) + plain * kept


def _yarn_scale(rope: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
