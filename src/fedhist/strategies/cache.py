"""The last upload of each client, as calibrating methods remember it, in as few bits as one likes."""

from typing import Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhist.errors import brief, require
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import Device, Strategy

Bits = Literal[32, 16, 8, 4]
BLOCK = 64
"""Values that share a scale where they are kept in 8 or 4 bits."""


class UploadCache(nn.Module):
    """`h_i`, the last upload of each client, zero before its first, and the sum of all.

    Parameters
    ----------
    bits
        32 keeps uploads as they are, 16 in bfloat16. With 8 and 4 bits, 64 values share a scale, and the others are
        rounded to the nearest of 255 or 15 levels; the sum is that of what is kept.
    """

    rows: Tensor
    """``(N, ·)``: what is kept of each client's last upload."""
    scales: Tensor
    total: Tensor
    """``(P,)``: `Σ_j h_j` in float64, so that years of adding and subtracting leave no trace."""

    def __init__(self, num_clients: int, num_params: int, bits: Bits, device: Device) -> None:
        super().__init__()
        self.bits, self.num_params = bits, num_params
        blocks = -(-num_params // BLOCK)
        width = num_params if bits >= 16 else blocks * BLOCK * bits // 8
        dtype = {32: torch.float32, 16: torch.bfloat16, 8: torch.int8, 4: torch.uint8}[bits]
        self.register_buffer("rows", torch.zeros(num_clients, width, dtype=dtype, device=device))
        if bits < 16:
            self.register_buffer("scales", torch.zeros(num_clients, blocks, device=device))
        self.register_buffer("total", torch.zeros(num_params, dtype=torch.float64, device=device))

    def exchange(self, clients: Tensor, uploads: Tensor) -> tuple[Tensor, Tensor]:
        """Keep these uploads as the clients' last ones; return what was kept of those before and of these."""
        before = self.last(clients, uploads.dtype)
        self._write(clients, uploads)
        kept = uploads if self.bits == 32 else self.last(clients, uploads.dtype)
        self.total += kept.sum(dim=0, dtype=torch.float64) - before.sum(dim=0, dtype=torch.float64)
        return before, kept

    def touched(self, arrivals: Arrivals) -> dict[str, Tensor]:
        """Return the rows that a round has written."""
        return {"rows": arrivals.clients} | ({"scales": arrivals.clients} if self.bits < 16 else {})

    def mean(self, dtype: torch.dtype) -> Tensor:
        """Return `h̄ = 1/N·Σ_j h_j`, ``(P,)``: clients that have never uploaded count as zero."""
        return (self.total / len(self.rows)).to(dtype)

    def last(self, clients: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what is kept of these clients' last uploads, ``(K, P)``."""
        rows = self.rows.index_select(0, clients)
        if self.bits >= 16:
            return rows.to(dtype)
        if self.bits == 4:  # two values a byte, -8 … 7 as 0 … 15
            rows = torch.stack([rows & 15, rows >> 4], dim=2).to(torch.int8) - 8
        scales = self.scales.index_select(0, clients).to(dtype)
        values = rows.view(*scales.shape, BLOCK).to(dtype) * scales[..., None]
        return values.flatten(1)[:, : self.num_params]

    def _write(self, clients: Tensor, uploads: Tensor) -> None:
        if self.bits >= 16:
            self.rows.index_copy_(0, clients, uploads.to(self.rows.dtype))
            return
        blocks = F.pad(uploads, (0, -self.num_params % BLOCK)).view(len(uploads), -1, BLOCK)
        levels = 2 ** (self.bits - 1) - 1
        scales = blocks.abs().amax(dim=2, keepdim=True) / levels
        rows = (blocks / scales).masked_fill(scales == 0, 0.0).clamp(-levels, levels).round().to(torch.int8).flatten(1)
        if self.bits == 4:
            pairs = (rows + 8).to(torch.uint8).view(len(rows), -1, 2)
            rows = pairs[..., 0] | (pairs[..., 1] << 4)
        self.rows.index_copy_(0, clients, rows)
        self.scales.index_copy_(0, clients, scales[..., 0].to(self.scales.dtype))


class Cached(Strategy):
    """A strategy that remembers the last upload of each client, zero before its first."""

    needs_num_clients = True
    cache: UploadCache

    def __init__(self, bits: Bits = 32) -> None:
        super().__init__()
        fits = isinstance(bits, int) and bits in (32, 16, 8, 4)
        require(fits, f"bits must be 32, 16, 8 or 4, got {brief(bits)}.")
        self.bits = bits

    def setup(self, num_clients: int, k: int, num_params: int, device: Device = None) -> Self:
        """Allocate the cache."""
        super().setup(num_clients, k, num_params, device)
        self.cache = UploadCache(num_clients, num_params, self.bits, device)
        return self
