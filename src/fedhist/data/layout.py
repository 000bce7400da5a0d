"""A model's trainable parameters as one flat vector, the form in which servers handle them."""

import torch
from torch import Tensor, nn

from fedhist.errors import require

Parameters = dict[str, Tensor]


class Layout:
    """Where each trainable parameter of a module lies in the flat vector."""

    def __init__(self, module: nn.Module) -> None:
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        require(bool(trainable), f"model {type(module).__name__} has no trainable parameters.")
        dtypes = {p.dtype for p in trainable.values()}
        fits = dtypes in ({torch.float32}, {torch.float64})
        name, kinds = type(module).__name__, sorted(map(str, dtypes))
        require(fits, f"model {name} must be all float32 or all float64, got {kinds}.")
        self.dtype = dtypes.pop()
        self.shapes = {name: p.shape for name, p in trainable.items()}
        self.sizes = [p.numel() for p in trainable.values()]
        self.size = sum(self.sizes)

    def flatten(self, module: nn.Module) -> Tensor:
        """Return a copy of the module's trainable parameters, ``(P,)``."""
        own = dict(module.named_parameters())
        return torch.cat([own[name].detach().reshape(-1) for name in self.shapes])

    def unflatten(self, flat: Tensor) -> Parameters:
        """Return views of a flat vector under the parameters' names."""
        parts = torch.split(flat, self.sizes)
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def load(self, module: nn.Module, flat: Tensor) -> None:
        """Copy a flat vector into a module."""
        own = dict(module.named_parameters())
        with torch.no_grad():
            for name, value in self.unflatten(flat).items():
                own[name].copy_(value)
