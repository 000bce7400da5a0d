"""Training loops of your own on the clients: sharpness-aware steps, and DP-SGD with Opacus (pip install opacus).

python examples/own_loop.py
"""

from __future__ import annotations

import importlib.util
import warnings

import torch
import torch.nn.functional as F
from torch import nn

import fedhist as fh


def sharpness_aware(module: nn.Module, batches, *, received, client) -> None:  # noqa: ARG001
    """Take steps with the gradient at the worst point nearby (SAM: Foret et al., ICLR 2021)."""
    parameters = list(module.parameters())
    for x, y in batches:
        slopes = torch.autograd.grad(F.cross_entropy(module(x), y), parameters)
        length = torch.linalg.vector_norm(torch.stack([slope.norm() for slope in slopes])) + 1e-12
        climbs = [0.05 * slope / length for slope in slopes]
        with torch.no_grad():
            torch._foreach_add_(parameters, climbs)
        slopes = torch.autograd.grad(F.cross_entropy(module(x), y), parameters)
        with torch.no_grad():
            torch._foreach_sub_(parameters, [c + 0.15 * slope for c, slope in zip(climbs, slopes, strict=True)])


def dp_sgd(module: nn.Module, batches, *, received, client) -> None:  # noqa: ARG001
    """Clip the gradient of every example and add noise: privacy of examples rather than of whole clients."""
    from opacus import GradSampleModule  # noqa: PLC0415 (not everybody has it)
    from opacus.optimizers import DPOptimizer  # noqa: PLC0415

    private = GradSampleModule(module)
    sgd = torch.optim.SGD(private.parameters(), lr=0.15)
    optimizer = DPOptimizer(sgd, noise_multiplier=0.3, max_grad_norm=1.0, expected_batch_size=32)
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(private(x), y).backward()
        optimizer.step()


def main() -> None:
    task = fh.load_task("digits", clients=20, beta=0.3)
    runs = {"local SGD": fh.Local(lr=0.15, steps=5), "SAM": fh.Local(loop=sharpness_aware, steps=5)}
    if importlib.util.find_spec("opacus"):
        runs["DP-SGD"] = fh.Local(loop=dp_sgd, steps=5)
        warnings.filterwarnings("ignore", "Full backward hook is firing")  # the first layer has no gradient to pass on
    for name, local in runs.items():
        history = fh.simulate("fedhist", task, k=5, rounds=60, eval_every=30, local=local)
        print(f"{name}: {100 * history.final_accuracy:.1f} % after {history.rounds} rounds")


if __name__ == "__main__":
    main()
