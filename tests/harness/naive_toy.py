"""The toy architecture recomputed from its stored tensors: slow, plain, and no code of the engine."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn import functional


class NaiveToy:
    """Logits of whole sequences, one at a time."""

    def __init__(self, checkpoint: Path) -> None:
        self.config = json.loads((checkpoint / "config.json").read_text())
        self.weights = load_file(checkpoint / "model.safetensors")

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        c, w = self.config, self.weights
        x = w["model.embed_tokens.weight"][torch.tensor(token_ids)]
        for layer in range(c["num_hidden_layers"]):
            prefix = f"model.layers.{layer}"
            normed = self.norm(x, f"{prefix}.input_layernorm.weight")
            if layer % 3 == 2:
                x = x + self.recurrence(normed, f"{prefix}.mixer")
            else:
                window = c["window_tokens"] if layer % 3 == 1 else len(token_ids)
                x = x + self.attention(normed, f"{prefix}.self_attn", window)
            normed = self.norm(x, f"{prefix}.post_attention_layernorm.weight")
            gate = normed @ w[f"{prefix}.mlp.gate_proj.weight"].T
            up = normed @ w[f"{prefix}.mlp.up_proj.weight"].T
            x = x + (functional.silu(gate) * up) @ w[f"{prefix}.mlp.down_proj.weight"].T
        return self.norm(x, "model.norm.weight") @ w["lm_head.weight"].T

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * self.weights[name]

    def attention(self, x: torch.Tensor, prefix: str, window: int) -> torch.Tensor:
        dim, length = self.config["head_dim"], x.shape[0]
        q, k, v = (
            (x @ self.weights[f"{prefix}.{part}_proj.weight"].T).view(length, -1, dim).transpose(0, 1)
            for part in ("q", "k", "v")
        )
        q, k = self.rope(q), self.rope(k)
        repeats = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
        scores = q @ k.transpose(1, 2) / dim**0.5
        ahead = torch.arange(length)[None, :] - torch.arange(length)[:, None]
        scores = scores.masked_fill((ahead > 0) | (ahead <= -window), float("-inf"))
        out = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1)
        return out @ self.weights[f"{prefix}.o_proj.weight"].T

    def rope(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        frequencies = self.config["rope_theta"] ** (-torch.arange(half) / half)
        angles = torch.arange(x.shape[1])[:, None] * frequencies
        first, second = x[..., :half], x[..., half:]
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1
        )

    def recurrence(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        values, decay, gate = (x @ self.weights[f"{prefix}.{part}_proj.weight"].T for part in ("in", "decay", "gate"))
        state, states = torch.zeros(values.shape[-1]), []
        for value, keep in zip(values, torch.sigmoid(decay), strict=True):
            state = keep * state + (1 - keep) * value
            states.append(state)
        return (torch.stack(states) * functional.silu(gate)) @ self.weights[f"{prefix}.out_proj.weight"].T

    def greedy(self, token_ids: list[int], count: int) -> list[int]:
        tokens = list(token_ids)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(token_ids) :]
