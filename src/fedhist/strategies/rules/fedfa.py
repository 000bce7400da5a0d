"""FedFa (Xu et al., "FedFa: A Fully Asynchronous Training Paradigm for Federated Learning", IJCAI 2024)."""

from typing import Literal, Self

import torch
from torch import Tensor

from fedhist.errors import choice, whole
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import Device, Strategy


class FedFa(Strategy):
    """Step at every arrival by the mean of the last `window` uploads, or to the mean of the last `window` models.

    Parameters
    ----------
    window
        How many of the last uploads are averaged.
    of
        "updates": each upload is used `window` times, in steps that follow one another also within a round; the first
        steps are means of the fewer uploads there are. "models": `w` becomes the mean of the clients' models
        `w_s - g_i`, as soon as there are as many.
    """

    branch_free = True
    last: Tensor
    count: Tensor

    def __init__(self, window: int = 10, of: Literal["updates", "models"] = "updates") -> None:
        super().__init__()
        self.window, self.of = whole("window", window, 1), choice("of", of, ("updates", "models"))
        self.averages_uploads = of == "updates"

    def setup(self, num_clients: int, k: int, num_params: int, device: Device = None) -> Self:
        """Begin with an empty window; the newest is the first in it."""
        super().setup(num_clients, k, num_params, device)
        self.register_buffer("last", torch.zeros(self.window, num_params, device=device))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64, device=device))
        return self

    def forward(self, arrivals: Arrivals) -> Tensor:
        """Return the sum of the round's K steps."""
        k, g = len(arrivals), arrivals.deltas
        queue = torch.cat([(g if self.of == "updates" else arrivals.received - g).flip(0), self.last])
        place, arrival = (torch.arange(n, device=g.device) for n in (len(queue), k))
        age = place[:, None] - (k - 1) + arrival  # of each in the queue, when each of the round's uploads arrives
        used = (age >= 0) & (age < self.window) & (place < k + self.count)[:, None]
        weights = (used / (self.count + 1 + arrival).clamp_max(self.window).double()).sum(dim=1)
        self.last.copy_(queue[: self.window])
        self.count.copy_((self.count + k).clamp_max(self.window))
        self.last_weights = weights[:k].flip(0)
        if self.of == "updates":
            return self.average(weights, queue)
        self.last_weights = torch.full_like(self.last_weights, 1 / self.window)
        return (arrivals.current - self.last.mean(dim=0)).masked_fill(self.count < self.window, 0.0)
