"""A model as one flat vector, the form in which servers handle it: trainable parameters, then running statistics."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedhist.errors import require

Parameters = dict[str, Tensor]


class Layout:
    """Where each trainable parameter of a module, and each statistic, lies in the flat vector.

    Statistics are buffers that training changes, such as those of batch normalisation. They follow the parameters.
    """

    def __init__(self, module: nn.Module, statistics: Sequence[str] = ()) -> None:
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
        """The number of trainable parameters P."""
        buffers = dict(module.named_buffers())
        self.statistics = {name: buffers[name].shape for name in statistics}
        self._sizes = [buffers[name].numel() for name in statistics]
        self.width = self.size + sum(self._sizes)
        """The length of the vector: P, and the statistics."""
        counted = [torch.full((buffers[n].numel(),), not buffers[n].is_floating_point()) for n in statistics]
        self.counts = torch.cat(counted) if counted else torch.zeros(0, dtype=torch.bool)
        """Which statistics are whole numbers: their increase is averaged, of others the value."""

    def flatten(self, module: nn.Module) -> Tensor:
        """Return a copy of the module's parameters and statistics, ``(width,)``."""
        own, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        parts = [own[name].detach().reshape(-1) for name in self.shapes]
        parts += [buffers[name].detach().reshape(-1).to(self.dtype) for name in self.statistics]
        return torch.cat(parts)

    def unflatten(self, flat: Tensor) -> Parameters:
        """Return views of a flat vector under their names; of P numbers, those of the parameters alone."""
        shapes, sizes = self.shapes, self.sizes
        if self.statistics and flat.shape[-1] == self.width:
            shapes, sizes = shapes | self.statistics, [*sizes, *self._sizes]
        parts = torch.split(flat, sizes)
        return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}

    def load(self, module: nn.Module, flat: Tensor) -> None:
        """Copy a flat vector into a module."""
        own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        with torch.no_grad():
            for name, value in self.unflatten(flat).items():
                own[name].copy_(value if own[name].is_floating_point() else value.round())

    def attach(self, module: nn.Module, flat: Tensor) -> None:
        """Let a module's parameters and statistics be views of a flat vector: what changes one changes the other."""
        own = dict(module.named_parameters())
        for name, view in self.unflatten(flat).items():
            if name in self.shapes:
                own[name].data = view
            else:
                path, _, last = name.rpartition(".")
                # Not the view itself: all views of a vector count their changes together, and autograd would find that
                # one layer's statistics have changed what another has saved.
                module.get_submodule(path)._buffers[last] = view.data

    def upload(self, received: Tensor, local: Tensor, out: Tensor) -> None:
        """Write what a client sends: how far its parameters moved, its statistics, and by how much counts grew."""
        size = self.size
        torch.sub(received[..., :size], local[..., :size], out=out[..., :size])
        if self.statistics:
            start, end = received[..., size : self.width], local[..., size : self.width]
            out[..., size : self.width] = torch.where(self.counts.to(out.device), end - start, end)
