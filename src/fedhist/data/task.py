"""A learning problem: a model, its data, and who holds which part of the data."""

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from fedhist.data.layout import Layout
from fedhist.errors import InvalidInput, rate, reason, require
from fedhist.store.arrays import checksum
from fedhist.streams import Stream

Clients = Sequence[ArrayLike] | NDArray[np.integer[Any]]


class Task:
    """A model, training and test data, and the part of the training data that each client holds.

    Parameters
    ----------
    model
        An ``nn.Module`` that maps a batch of `x` to one logit per class. Runs start from the weights it
        carries. A function without arguments that builds such a module is called once per run instead,
        with torch's generator seeded from the run's seed.
    x, y
        Training inputs of any shape ``(examples, …)`` and integer labels ``(examples,)``.
    clients
        For each client, the indices of its examples: a list of lists or arrays, or one array ``(N, n)`` of
        integers where every client holds n.
    x_test, y_test
        Test data, in the same form.
    name
        What reports call it.
    lr
        The clients' learning rate in runs without `local`.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        x: Tensor,
        y: Tensor,
        clients: Clients,
        x_test: Tensor,
        y_test: Tensor,
        name: str = "custom",
        lr: float | None = None,
    ) -> None:
        for label, inputs, targets in (("", x, y), ("_test", x_test, y_test)):
            fits = isinstance(inputs, Tensor) and isinstance(targets, Tensor)
            kinds = f"{type(inputs).__name__} and {type(targets).__name__}"
            require(fits, f"x{label} and y{label} must be tensors, got {kinds}.")
            fits = targets.ndim == 1 and len(inputs) == len(targets) > 0
            rows = f"{len(inputs)} rows of x{label}, got shape {tuple(targets.shape)}"
            require(fits, f"y{label} must hold one label for each of the {rows}.")
            least, kind = targets.min().item(), targets.dtype
            fits = not targets.is_floating_point() and least >= 0
            require(fits, f"y{label} must hold class numbers ≥ 0, got {kind} with minimum {least}.")
        fits = isinstance(model, nn.Module) or callable(model)
        require(fits, f"model must be an nn.Module or a function that builds one, got {type(model).__name__}.")
        self.name, self.model = name, model
        self.lr = None if lr is None else rate("lr", lr)
        self.about: dict[str, Any] = dict(getattr(clients, "about", {}))
        """How the data were divided, where that is known: runs that differ here are different experiments."""
        self.x, self.y, self.x_test, self.y_test = x, y.long(), x_test, y_test.long()
        self.examples, self.offsets = _join(clients, len(x))
        self.num_clients = len(self.offsets) - 1
        """The number of clients N."""
        self._copies: dict[tuple[Tensor, torch.device], Tensor] = {}
        self._relabelled: list[Self] = []

        probe = self.build(seed=0)
        self.layout = Layout(probe)
        logits, self.is_random = _try_model(probe, x, "x")
        _try_model(probe, x_test, "x_test")
        if logits.shape[1] > 1 and bool((logits >= 0).all() and ((logits.sum(dim=1) - 1).abs() < 1e-4).all()):
            summed = f"the outputs of model {type(probe).__name__} sum to one, as after a softmax"
            warnings.warn(f"{summed}; cross-entropy expects logits, so remove the softmax.", stacklevel=2)
        self.num_classes, largest = int(logits.shape[1]), int(max(self.y.max(), self.y_test.max()))
        fits = largest < self.num_classes
        require(fits, f"model {type(probe).__name__} has {self.num_classes} outputs, but the labels run to {largest}.")
        self.seed_matters = not isinstance(model, nn.Module) and self._differs_by_seed(probe)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """How many examples each client holds, ``(N,)``."""
        return np.diff(self.offsets)

    def client(self, i: int) -> NDArray[np.int64]:
        """Return the indices of one client's examples."""
        return self.examples[self.offsets[i] : self.offsets[i + 1]]

    def build(self, seed: int) -> nn.Module:
        """Return a fresh model with the weights that a run with this seed starts from."""
        if isinstance(self.model, nn.Module):
            return copy.deepcopy(self.model)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(Stream(seed, "init").integer())
            try:
                module = self.model()
            except TypeError as error:
                name = getattr(self.model, "__name__", type(self.model).__name__)
                raise InvalidInput(
                    f"model={name} cannot be built without arguments ({reason(error)}); give a module, such as "
                    f"{name}(…), or a function without arguments that builds one."
                ) from error
        if not isinstance(module, nn.Module):
            raise InvalidInput(f"model() must return an nn.Module, got {type(module).__name__}.")
        return copy.deepcopy(module)  # the function may return the same module every time

    def _differs_by_seed(self, probe: nn.Module) -> bool:
        """Whether models of two seeds differ in more than their trainable parameters, such as in frozen layers."""
        other = self.build(seed=1)
        self.layout.load(other, self.layout.flatten(probe))
        with torch.no_grad():
            return not torch.equal(probe.eval()(self.x[:2]), other.eval()(self.x[:2]))

    @property
    def data(self) -> tuple[int, ...]:
        """The identity of the tensors: tasks of several seeds often differ only in the split."""
        return id(self.x), id(self.y), id(self.x_test), id(self.y_test)

    @cached_property
    def checksum(self) -> str:
        """A checksum of labels, clients and a sample of the inputs, since hashing all of them takes a second."""
        samples = [t.reshape(-1)[:: max(1, t.numel() // 100_000)] for t in (self.x, self.x_test)]
        arrays = [t.cpu().contiguous().view(torch.uint8).numpy() for t in (*samples, self.y, self.y_test)]
        return checksum(*arrays, self.examples, self.offsets)

    def bytes_for(self, device: torch.device) -> int:
        """Return the memory that copying the data to a device will take."""
        tensors = () if device.type == "cpu" else (self.x, self.y, self.x_test, self.y_test)
        return sum(tensor.nbytes for tensor in tensors if (tensor, device) not in self._copies)

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return `x, y, x_test, y_test` on a device, copied there once."""
        tensors = self.x, self.y, self.x_test, self.y_test
        for tensor in tensors:
            if (tensor, device) not in self._copies:
                self._copies[tensor, device] = tensor.to(device)
        return tuple(self._copies[tensor, device] for tensor in tensors)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_copies": {}, "_relabelled": []}  # another machine has other devices

    def relabelled(self, y: Tensor) -> Self:
        """Return this task with other training labels; the inputs and their copies on devices are shared.

        The same labels give the same task, so that runs with it can train side by side.
        """
        for known in self._relabelled:
            if torch.equal(known.y, y):
                return known
        task = copy.copy(self)
        task.__dict__.pop("checksum", None)
        task.y, task._copies = y, self._copies
        self._relabelled.append(task)
        return task

    def label_counts(self, clients: ArrayLike | None = None) -> NDArray[np.int64]:
        """Return how many examples of each class the given clients hold, or all clients: ``(clients, classes)``."""
        ids = np.arange(self.num_clients) if clients is None else np.asarray(clients)
        examples = self.examples if clients is None else np.concatenate([self.client(i) for i in ids.tolist()])
        owner = np.repeat(np.arange(len(ids)), self.sizes[ids])
        flat = owner * self.num_classes + self.y.cpu().numpy()[examples]
        return np.bincount(flat, minlength=len(ids) * self.num_classes).reshape(-1, self.num_classes)

    def __repr__(self) -> str:
        return (
            f"Task({self.name!r}, clients={self.num_clients}, examples={len(self.examples)}, "
            f"classes={self.num_classes}, parameters={self.layout.size})"
        )


def _join(clients: Clients, num_examples: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the example indices of all clients end to end, and where those of each client begin."""
    listed = clients.ndim == 2 if isinstance(clients, np.ndarray) else isinstance(clients, Sequence)
    require(listed and len(clients) > 0, "clients must be a list with one list of example indices for each client.")
    if isinstance(clients, np.ndarray):
        parts, sizes = [clients.ravel()], np.full(len(clients), clients.shape[1])
    else:
        parts = [np.asarray(part) for part in clients]
        sizes = np.array([part.size for part in parts])
    usable = all(part.ndim == 1 and part.size > 0 and part.dtype.kind in "iu" for part in parts)
    if usable:
        examples = np.concatenate(parts, dtype=np.int64, casting="same_kind")
        usable = bool(examples.min() >= 0 and examples.max() < num_examples)
    if not usable:  # a million clients are checked together, and one by one only to name the one at fault
        for i, part in enumerate(map(np.asarray, clients)):
            require(part.ndim == 1 and len(part) > 0, f"clients[{i}] holds no examples; every client needs one.")
            fits = part.dtype.kind in "iu" and part.min() >= 0 and part.max() < num_examples
            require(fits, f"clients[{i}] must hold indices from 0 to {num_examples - 1}.")
    return examples, np.concatenate([[0], np.cumsum(sizes)])


def _try_model(probe: nn.Module, inputs: Tensor, name: str) -> tuple[Tensor, bool]:
    """Return the logits of two examples, and whether the model draws random numbers in training, as dropout does."""
    buffers = {key: buffer.clone() for key, buffer in probe.named_buffers()}
    model, shape = type(probe).__name__, tuple(inputs.shape[1:])
    try:
        with torch.random.fork_rng(devices=[]):
            generator = torch.get_rng_state()
            logits: Any = probe.train()(inputs[:2])
            is_random = not torch.equal(generator, torch.get_rng_state())
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise InvalidInput(
            f"model {model} does not fit {name}, of shape {shape} and type {inputs.dtype}: {reason(error)}."
        ) from error
    fits = isinstance(logits, Tensor) and logits.ndim == 2 and len(logits) == len(inputs[:2])
    got = getattr(logits, "shape", type(logits))
    require(fits, f"model {model} must return logits of shape (batch, classes), got {got}.")
    changed = [key for key, buffer in probe.named_buffers() if not torch.equal(buffer, buffers[key])]
    norms = [key for key, module in probe.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for key in changed + norms:
        raise InvalidInput(
            f"model {model} depends on statistics of its batches ({key}), which averaging parameters cannot merge; "
            "use GroupNorm or LayerNorm instead."
        )
    return logits, is_random
