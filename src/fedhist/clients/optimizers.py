"""Optimizers on flat vectors: one client's parameters ``(P,)``, or those of many side by side, ``(M, P)``.

They compute what ``torch.optim`` does, which the reference trainer uses.
"""

import inspect
import math
from typing import Any, Protocol

import torch
from torch import Tensor, nn, optim

from fedhist.clients.local import KNOWN, Local
from fedhist.errors import InvalidInput, reason, require

Rate = float | Tensor
"""A learning rate, or one for each client: ``(M, 1)``."""


class Optimizer(Protocol):
    """One training's optimizer, with the state it needs."""

    def step(self, flat: Tensor, gradient: Tensor, lr: Rate) -> Tensor:
        """Return the parameters after a step."""


def optimizer_of(local: Local) -> Optimizer:
    """Return a fresh optimizer."""
    name, options = local.parsed
    if name == "sgd":
        return _SGD(local)
    if name in KNOWN:
        return _Adam(local.weight_decay, decoupled=name == "adamw", **options)
    return _Torch(local)


def clipped(gradient: Tensor, most: float) -> Tensor:
    """Return gradients scaled to a length of at most so much, as ``torch.nn.utils.clip_grad_norm_`` does."""
    norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
    scale: Tensor = (most / (norm + 1e-6)).clamp(max=1.0)
    return gradient * scale


class _SGD:
    def __init__(self, local: Local) -> None:
        self._momentum, self._decay, self._nesterov = local.momentum, local.weight_decay, local.nesterov
        self._velocity: Tensor | None = None

    def step(self, flat: Tensor, gradient: Tensor, lr: Rate) -> Tensor:
        if self._decay:
            gradient = gradient.add(flat, alpha=self._decay)
        if self._momentum:
            if self._velocity is not None:
                self._velocity = gradient.add(self._velocity, alpha=self._momentum)
            else:
                self._velocity = gradient
            gradient = gradient.add(self._velocity, alpha=self._momentum) if self._nesterov else self._velocity
        return flat - lr * gradient if isinstance(lr, Tensor) else flat.add(gradient, alpha=-lr)


class _Adam:
    """Adam (Kingma and Ba, 2015), and AdamW, whose decay does not pass through the moments."""

    def __init__(
        self, decay: float, *, decoupled: bool, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        self._decay, self._decoupled, self._betas, self._eps = decay, decoupled, betas, eps
        self._steps = 0
        self._moments: tuple[Tensor, Tensor] | None = None

    def step(self, flat: Tensor, gradient: Tensor, lr: Rate) -> Tensor:
        (one, two), self._steps = self._betas, self._steps + 1
        if self._decay and self._decoupled:
            flat = flat * (1 - lr * self._decay)
        elif self._decay:
            gradient = gradient.add(flat, alpha=self._decay)
        if self._moments is None:
            self._moments = torch.zeros_like(flat), torch.zeros_like(flat)
        mean, square = self._moments
        mean.lerp_(gradient, 1 - one)
        square.mul_(two).addcmul_(gradient, gradient, value=1 - two)
        spread = square.sqrt().div_(math.sqrt(1 - two**self._steps)).add_(self._eps)
        step = lr / (1 - one**self._steps)
        if isinstance(step, Tensor):
            return flat - step * (mean / spread)
        return flat.addcdiv(mean, spread, value=-step)


class _Torch:
    """PyTorch's own optimizer on a flat vector; right for those that treat every parameter by itself."""

    def __init__(self, local: Local) -> None:
        self._local = local
        self._parameter: nn.Parameter | None = None
        self._optimizer: optim.Optimizer | None = None

    def step(self, flat: Tensor, gradient: Tensor, lr: Rate) -> Tensor:
        if self._parameter is None or self._optimizer is None:
            self._parameter = nn.Parameter(torch.empty_like(flat))
            self._optimizer = torch_optimizer(self._local, [self._parameter], float(lr))
        self._parameter.data.copy_(flat)
        self._parameter.grad = gradient
        self._optimizer.step()
        return self._parameter.detach().clone()


def torch_optimizer(local: Local, parameters: Any, lr: float) -> optim.Optimizer:
    """Return the optimizer of ``torch.optim`` that local work names."""
    name, options = local.parsed
    kinds: dict[str, Any] = {n.lower(): kind for n, kind in vars(optim).items() if isinstance(kind, type)}
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    if name == "sgd":
        options |= {"momentum": local.momentum, "nesterov": local.nesterov}
    if "weight_decay" in inspect.signature(kinds[name]).parameters:  # whose own default need not be 0
        require("weight_decay" not in options, "weight_decay is an option of Local, not of its optimizer.")
        options["weight_decay"] = local.weight_decay
    else:
        require(local.weight_decay == 0, f"optimizer={name!r} has no weight decay.")
    try:
        made: optim.Optimizer = kinds[name](parameters, lr=lr, **options)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"optimizer={local.optimizer!r} cannot be used: {reason(error)}.") from error
    return made


def why_not_flat(local: Local) -> str | None:
    """Return why an optimizer cannot work on a flat vector, as part of a sentence; None if it can."""
    name, _ = local.parsed
    if name in KNOWN:
        return None
    generator = torch.Generator().manual_seed(0)
    first, *slopes = (torch.randn(2, 3, generator=generator) for _ in range(4))
    shaped = nn.Parameter(first.clone())
    own, flat, many = torch_optimizer(local, [shaped], 0.1), first.clone().reshape(1, 6), _Torch(local)
    try:
        for slope in slopes:
            shaped.grad = slope.clone()
            own.step()
            flat = many.step(flat, slope.reshape(1, 6), 0.1)
    except RuntimeError as error:
        return f"{name} cannot be used on a flat vector ({reason(error)})"
    if torch.allclose(shaped.detach().reshape(1, 6), flat, rtol=1e-4, atol=1e-6):
        return None
    return f"{name} does not treat every parameter by itself"
