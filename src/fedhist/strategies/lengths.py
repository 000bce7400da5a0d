"""What strategies measure vectors by: lengths, cosines, clipping, least squares."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = 1e12
"""Largest value of an upload that strategies compute with: products of any two such vectors stay inside float32, whose
own largest number is 3e38. No model that learns comes near it."""
PIECE = 1 << 20
"""Values that are clipped at a time: their lengths take float64 copies."""


def in_range(uploads: Tensor) -> Tensor:
    """Return uploads, ``(K, P)``, whose float32 values beyond ±1e12 count as that; others keep every bit."""
    low, high = torch.aminmax(uploads)
    if uploads.dtype == torch.float64 or (float(low) >= -LARGEST and float(high) <= LARGEST):
        return uploads
    return uploads.clamp(-LARGEST, LARGEST)


def measured(vectors: Tensor) -> Tensor:
    """Return lengths along the last axis, computed in float64, also of float64 vectors whose squares overflow."""
    if vectors.dtype != torch.float64:
        norms: Tensor = torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float64)
        return norms
    exponent = torch.frexp(vectors.abs().amax(dim=-1, keepdim=True)).exponent.clamp(-1000, 1000)
    scale = torch.exp2(exponent.double())
    scaled: Tensor = torch.linalg.vector_norm(vectors / scale, dim=-1)
    return scaled * scale[..., 0]


def cosine(dots: Tensor, norms_a: Tensor, norms_b: Tensor) -> Tensor:
    """Return the cosine similarity (Eq. 5) from dot products and norms, in float64; 0 where a vector is zero."""
    scale = norms_a.double() * norms_b
    return (dots / scale).masked_fill(scale == 0, 0.0)


def least_squares(rows: Tensor, wanted: Tensor) -> Tensor:
    """Return the shortest `x`, ``(2,)``, of those that bring `x @ rows` nearest to what is wanted, without branches."""
    gram = rows @ rows.T
    trace, det = gram.trace(), gram[0, 0] * gram[1, 1] - gram[0, 1].square()
    singular = det <= 1e-12 * trace.square()
    adjugate = trace * torch.eye(2, dtype=gram.dtype, device=gram.device) - gram
    x: Tensor = torch.where(singular, gram / trace.square(), adjugate / det) @ (rows @ wanted)
    return x


def clip_factor(norms: Tensor, bound: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Return the factors that shorten vectors of these norms to at most `bound`.

    A factor too small to have all its digits is rounded down: the vector then becomes too short rather than too long.
    """
    norms = norms.double()
    limit = bound if isinstance(bound, Tensor) else torch.full_like(norms, bound)  # a number times 1/norms may overflow
    factor = torch.where(norms > limit, limit / norms, 1.0)
    return (factor - _smallest(dtype)).clamp_min(0).to(dtype)


def _smallest(dtype: torch.dtype) -> float:
    """Return the smallest positive number of a type: subtracting it changes no number that has all its digits."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def clipped(uploads: Tensor, clip: float) -> Tensor:
    """Shorten uploads, ``(…, P)``, that are longer than `clip`; one that is not finite becomes zero.

    No length of the result, computed in float64, exceeds `clip`: that is the sensitivity which noise is scaled to.
    """
    rows = uploads.reshape(-1, uploads.shape[-1])
    pieces = torch.split(rows, max(1, PIECE // max(1, rows.shape[1])))
    return torch.cat([_clipped(piece, clip) for piece in pieces]).reshape(uploads.shape)


def _clipped(uploads: Tensor, clip: float) -> Tensor:
    work, size = torch.promote_types(uploads.dtype, torch.float32), uploads.shape[1]
    norms = measured(uploads)[:, None]
    short = (uploads * clip_factor(norms, clip, work)).to(uploads.dtype)
    short = short.masked_fill_(~torch.isfinite(norms), 0.0)
    # Rounding may have made it longer by a hair; the slack is for other ways to compute the length in float64.
    slack = size * 2.0**-58 + (2.0**-50 if work == torch.float64 else 0.0)
    longer = measured(short)[:, None] > clip * (1 - slack)
    kept = torch.finfo(uploads.dtype)
    shorter = short.to(work) * (1 - longer.double() * (4 * kept.eps + 2 * slack)).to(work)
    if clip < 2 * math.sqrt(size) * kept.smallest_normal:  # rounding is absolute there
        shorter = torch.where(longer, F.softshrink(shorter, 2 * _smallest(uploads.dtype)), shorter)
    return shorter.to(uploads.dtype)
