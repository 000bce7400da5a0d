"""A strategy of your own against two built-in ones: weight uploads by staleness and by agreement.

python examples/custom_strategy.py
"""

from __future__ import annotations

from typing import Self

import torch

import fedhist as fh


class Agreement(fh.Strategy):
    """Weight each upload by 1/√τ and by its cosine with a moving average of past updates."""

    branch_free = True  # reads no tensor's values, keeps all state in buffers: a GPU may capture its rounds
    direction: torch.Tensor

    def __init__(self, decay: float = 0.9) -> None:
        super().__init__()
        self.decay = decay

    def setup(self, num_clients: int, k: int, num_params: int, device: torch.device | str | None = None) -> Self:
        super().setup(num_clients, k, num_params, device)
        self.register_buffer("direction", torch.zeros(num_params, device=device))
        return self

    def weights(self, arrivals: fh.Arrivals) -> torch.Tensor:
        cosine = torch.nn.functional.cosine_similarity(arrivals.deltas, self.direction[None])
        return (1 + cosine) / arrivals.staleness.sqrt()

    def forward(self, arrivals: fh.Arrivals) -> torch.Tensor:
        update = super().forward(arrivals)
        self.direction.mul_(self.decay).add_(update, alpha=1 - self.decay)
        return update


def main() -> None:
    runs = fh.compare(
        [fh.FedAvg(), Agreement(), fh.FedHist()],
        lambda seed: fh.load_task("digits", clients=50, beta=0.3, seed=seed),
        k=5,
        rounds=200,
        seeds=2,
        local=fh.LocalSGD(lr=0.1),
        eval_every=50,
    )
    for method in runs.methods:
        accuracies = [f"{100 * history.final_accuracy:.1f} %" for history in runs[method]]
        print(f"{method:22} {', '.join(accuracies)}")


if __name__ == "__main__":
    main()
