"""WKAFL: two-stage weighted K-async learning (Zhou et al., IEEE TPDS 2022, Algorithm 1)."""

from typing import Self

import torch
from torch import Tensor

from fedhist.errors import number, positive, whole
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import Device, Strategy, normalised
from fedhist.strategies.lengths import clip_factor, cosine
from fedhist.strategies.rules.twafl import temporal_weight


class WKAFL(Strategy):
    """Keep the uploads that agree with a staleness-weighted estimate of the gradient.

    The authors clip gradients at absolute lengths tuned for each task. Uploads here include the client's learning
    rate, so `clip` is relative to the round's median length.

    Parameters
    ----------
    momentum
        `a`: share of the previous update added to each upload.
    clip
        `B1`: longest upload with its momentum, in multiples of the round's median length (of two, the lower one).
    stage_two
        Round from which kept uploads are clipped a second time.
    stage_two_clip
        `B2`: longest kept upload in stage two, in multiples of the estimate's length.
    threshold
        Smallest cosine with the estimate at which an upload is kept.
    sharpness
        `b`: kept uploads are weighted by `exp(b·cos)`; published values lie between 10 and 50.
    slowdown
        `c`: the step is scaled by `1/(1 + c·min τ)`.
    """

    branch_free = True
    previous: Tensor
    round: Tensor

    def __init__(
        self,
        momentum: float = 0.1,
        clip: float = 10.0,
        stage_two: int = 3500,
        stage_two_clip: float = 5.0,
        threshold: float = 0.3,
        sharpness: float = 10.0,
        slowdown: float = 0.01,
    ) -> None:
        super().__init__()
        self.momentum, self.threshold = number("momentum", momentum), number("threshold", threshold)
        self.clip, self.stage_two_clip = positive("clip", clip), positive("stage_two_clip", stage_two_clip)
        self.stage_two, self.sharpness = whole("stage_two", stage_two), number("sharpness", sharpness)
        self.slowdown = number("slowdown", slowdown, 0)

    def setup(self, num_clients: int, k: int, num_params: int, device: Device = None) -> Self:
        """Allocate the previous update and the round counter."""
        super().setup(num_clients, k, num_params, device)
        self.register_buffer("previous", torch.zeros(num_params, device=device))
        self.register_buffer("round", torch.zeros((), device=device, dtype=torch.int64))
        return self

    def forward(self, arrivals: Arrivals) -> Tensor:
        """Return the mean of the consistent uploads, shortened when even the freshest is stale."""
        self.round += 1
        g = arrivals.deltas + self.momentum * self.previous
        norms = g.norm(dim=1)
        median = norms.median()
        clip = clip_factor(norms, torch.where(median > 0, self.clip * median, torch.inf), g.dtype)
        g, norms = g * clip[:, None], norms * clip

        w = temporal_weight(arrivals.staleness - arrivals.staleness.min())  # only ratios matter
        estimate = normalised(w).to(g.dtype) @ g  # ĝ
        length = estimate.norm()
        similarity = cosine(g @ estimate, norms, length)
        kept = similarity > self.threshold
        # exp(b·(cos - 1)) is exp(b·cos) up to a factor that normalising removes, and cannot overflow.
        q = w * torch.exp(self.sharpness * (similarity - 1)) * kept

        stage_two = kept.any() & (self.round >= self.stage_two)
        second_clip = torch.where(stage_two, clip_factor(norms, self.stage_two_clip * length, g.dtype), 1.0)
        update = self.combine(torch.where(kept.any(), q, w), g * second_clip[:, None])
        self.previous.copy_(update)
        return update / (1 + self.slowdown * arrivals.staleness.min().double()).to(update.dtype)
