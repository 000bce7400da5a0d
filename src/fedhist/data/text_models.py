"""Models that predict the next character: from numbers of characters, ``(batch, length)``, to logits."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CharLSTM(nn.Module):
    """LEAF's model of text (Caldas et al., 2018): an embedding of 8 and two LSTM layers of 256."""

    def __init__(self, letters: int = 80) -> None:
        super().__init__()
        self.embedding = nn.Embedding(letters, 8)
        self.lstm = nn.LSTM(8, 256, num_layers=2, batch_first=True)
        self.out = nn.Linear(256, letters)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the character after the last."""
        hidden, _ = self.lstm(self.embedding(x.long()))
        return self.out(hidden[:, -1])  # type: ignore[no-any-return]


class _Layer(nn.Module):
    """Causal self-attention and a layer for each position, both beside a shortcut and after LayerNorm.

    Attention is written out, so that the last layer need not compute positions that nobody reads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key_value, self.proj = (nn.Linear(width, n * width) for n in (1, 2, 1))
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        """Return what comes after as many of the last positions as `hidden` has rows."""
        normed, rows = self.norm1(x), len(hidden)
        query = self._heads(self.query(normed[:, -rows:]), 1)[0]
        key, value = self._heads(self.key_value(normed), 2)
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        mixed = torch.softmax(scores + hidden, dim=-1) @ value
        x = x[:, -rows:] + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))  # type: ignore[no-any-return]

    def _heads(self, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        """Return parts of the last axis, ``(batch, heads, positions, width of a head)`` each."""
        batch, length, _ = x.shape
        return x.reshape(batch, length, parts, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)


class CharTransformer(nn.Module):
    """A small transformer: two layers of width 128 with four heads, and a learned vector for each position."""

    hidden: Tensor

    def __init__(self, letters: int = 80, length: int = 80, width: int = 128, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(letters, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.ModuleList(_Layer(width, heads) for _ in range(layers))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, letters)
        self.register_buffer("hidden", torch.full((length, length), -math.inf).triu(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the character after the last."""
        x = self.embedding(x.long()) + self.positions[: x.shape[1]]
        *before, last = self.layers
        hidden = self.hidden[: x.shape[1], : x.shape[1]]
        for layer in before:
            x = layer(x, hidden)
        x = last(x, hidden[-1:])  # nothing else of it is read, which leaves out two fifths of the work
        return self.out(self.norm(x[:, -1]))  # type: ignore[no-any-return]
