"""Lengths, cosines and clipping that hold for every finite vector.

A float32 holds 1e-45 to 3e38, but its square only if it lies between 1e-22 and 1e19. Where more is at hand, vectors are
multiplied by a power of two, which changes no digit and is 1 for ordinary ones. Nothing here waits for a GPU.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

SAFE = 40
"""Squares, products and sums of vectors whose lengths lie between 2^-40 and 2^40 stay well inside float32."""
DIRECTION = 32
"""Vectors of which the direction is needed are kept with values of at most 2^-32, so that no product with another
vector of up to 2^32 values overflows."""
PIECE = 1 << 20
"""Values that are clipped at a time: their lengths take float64 copies."""


def largest(vector: Tensor) -> Tensor:
    """Return the largest absolute value, without the copy that `abs` would make."""
    return torch.maximum(vector.amax().abs(), vector.amin().abs())


def unit(size: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a power of two that brings `size` to 2^±40: 1 where it already lies between these."""
    exponent = torch.frexp(size).exponent
    return torch.exp2((exponent.clamp(-SAFE, SAFE) - exponent).to(dtype))


def direction(vector: Tensor, factor: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """Return `vector·factor` divided by a power of two, so that its values are at most 2^-32, and that power.

    The vector's own values have to be below 2^90 in float32, which holds no factor small enough for others.
    """
    power = torch.exp2((torch.frexp(largest(vector).double() * factor).exponent + DIRECTION).double())
    return vector * (factor / power).to(vector.dtype), power


def lengths(vectors: Tensor) -> Tensor:
    """Return the length of each row, ``(K,)`` in float64; only where squares leave the range is it computed so."""
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=1).double()
    odd = norms.clamp(2.0**-SAFE, 2.0**SAFE) != norms
    if vectors.device.type == "cpu":
        rows = torch.nonzero(odd)[:, 0]  # none, as a rule
        norms.index_copy_(0, rows, measured(vectors.index_select(0, rows)))
        return norms
    if vectors.dtype == torch.float64:
        return torch.where(odd, measured(vectors), norms)
    exact = torch._foreach_norm(list(vectors), 2, dtype=torch.float64)  # without a float64 copy
    return torch.where(odd, torch.stack(exact), norms)


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
