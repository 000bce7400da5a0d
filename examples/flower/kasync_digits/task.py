"""The data, the model and the local work; replace these three and the app is yours."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from flwr.app import UserConfig
from torch import Tensor, nn

import fedhist as fh


@lru_cache
def digits(clients: int, beta: float, seed: int) -> fh.Task:
    """Return scikit-learn's digits, which need no download, divided among clients."""
    return fh.load_task("digits", clients, beta or None, seed)


def task_of(config: UserConfig) -> fh.Task:
    """Return the task that a run's configuration describes."""
    return digits(int(config["clients"]), float(config["beta"]), int(config["seed"]))


def train(model: nn.Module, x: Tensor, y: Tensor, config: UserConfig, round_: int) -> float:
    """Take some steps of SGD and return the mean loss."""
    rng = np.random.default_rng([int(config["seed"]), round_])
    optimizer = torch.optim.SGD(model.parameters(), lr=float(config["lr"]))
    model.train()
    losses = []
    for _ in range(int(config["local-steps"])):
        batch = torch.from_numpy(rng.choice(len(y), min(int(config["batch-size"]), len(y)), replace=False))
        loss = F.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return float(np.mean(losses))


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    """Return accuracy and loss."""
    model.eval()
    logits = model(x)
    return {"accuracy": (logits.argmax(1) == y).float().mean().item(), "loss": F.cross_entropy(logits, y).item()}
