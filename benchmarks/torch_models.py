"""Models of the workloads in torch's usual way, with its fused attention, so that the comparison is fair."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from workloads import Workload


class Attention(nn.Module):
    """Causal attention with one matrix for q, k and v."""

    def __init__(self, size: Workload) -> None:
        super().__init__()
        self.heads, self.rotary = size.heads, size.arch == "llama"
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=not self.rotary)
        self.out = nn.Linear(size.width, size.width, bias=not self.rotary)
        head_width = size.width // size.heads
        frequencies = 10000.0 ** (-torch.arange(0, head_width, 2) / head_width)
        angles = torch.outer(torch.arange(size.context), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def turned(self, x: Any) -> Any:
        """Return x after rotating its split halves by their positions."""
        a, b = x.chunk(2, dim=-1)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)  # cast, so that a bfloat16 x stays bfloat16
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def forward(self, x: Any) -> Any:
        """Return attention of x (B, T, C), as (B, T, C)."""
        shape = (*x.shape[:2], self.heads, x.shape[2] // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(x).split(x.shape[2], dim=-1))
        if self.rotary:
            q, k = self.turned(q), self.turned(k)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class SwiGLU(nn.Module):
    """Feed-forward down(silu(gate(x)) * up(x))."""

    def __init__(self, size: Workload) -> None:
        super().__init__()
        self.gate = nn.Linear(size.width, size.ffn, bias=False)
        self.up = nn.Linear(size.width, size.ffn, bias=False)
        self.down = nn.Linear(size.ffn, size.width, bias=False)

    def forward(self, x: Any) -> Any:
        """Return the feed-forward of x (B, T, C), as (B, T, C)."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class MLP(nn.Module):
    """Feed-forward down(gelu(up(x)))."""

    def __init__(self, size: Workload) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(size.width, size.ffn), nn.Linear(size.ffn, size.width)

    def forward(self, x: Any) -> Any:
        """Return the feed-forward of x (B, T, C), as (B, T, C)."""
        return self.down(functional.gelu(self.up(x), approximate="tanh"))


def norm(size: Workload) -> Any:
    """Return the norm that the architecture uses: RMSNorm or LayerNorm."""
    return nn.RMSNorm(size.width, eps=1e-5) if size.arch == "llama" else nn.LayerNorm(size.width, eps=1e-5)


class Block(nn.Module):
    """Block with attention, feed-forward and residual connections."""

    def __init__(self, size: Workload) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(size), norm(size)
        self.attention = Attention(size)
        self.mlp = SwiGLU(size) if size.arch == "llama" else MLP(size)

    def forward(self, x: Any) -> Any:
        """Return the output (B, T, C) of the block for x (B, T, C)."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Model that returns logits for tokens."""

    def __init__(self, size: Workload) -> None:
        super().__init__()
        llama = size.arch == "llama"
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = None if llama else nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList([Block(size) for _ in range(size.layers)])
        self.norm = norm(size)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        if not llama:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Any) -> Any:
        """Return logits (B, T, V) of ids (B, T)."""
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
