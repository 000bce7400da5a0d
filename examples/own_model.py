"""A PyTorch model and data of your own: sine waves in noise, one kind for each class, held by 40 skewed clients.

python examples/own_model.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fedhist as fh


def waves(examples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return signals of 64 points and which of five frequencies each has."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(5, (examples,), generator=generator)
    phase = 6.28 * torch.rand(examples, 1, generator=generator)
    clean = torch.sin((y[:, None] + 1) * torch.linspace(0, 6.28, 64) + phase)
    return (clean + 0.5 * torch.randn(examples, 64, generator=generator))[:, None], y


class WaveNet(nn.Module):
    """Any nn.Module that returns one logit per class."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 8, 9, padding=4)
        self.norm = nn.GroupNorm(2, 8)
        self.head = nn.Linear(8 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.conv(x)))
        return self.head(nn.functional.max_pool1d(hidden, 4).flatten(1))


def main() -> None:
    x, y = waves(2000, seed=0)
    x_test, y_test = waves(500, seed=1)
    clients = fh.dirichlet(y, clients=40, beta=0.3)  # or any list of index lists
    task = fh.Task(WaveNet, x, y, clients, x_test, y_test, name="waves")
    print(task)

    history = fh.simulate("fedhist", task, k=4, rounds=300, local=fh.LocalSGD(lr=0.1), eval_every=100)
    print([f"{100 * accuracy:.1f} %" for accuracy in history.accuracy])

    trained = WaveNet()
    trained.load_state_dict(history.model)
    right = trained(x_test).argmax(dim=1) == y_test
    print(f"the trained model is right on {right.sum()} of {len(right)} test signals")


if __name__ == "__main__":
    main()
