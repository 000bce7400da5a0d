"""A learning problem: a model, its data, and who holds which part of the data."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

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
    """A model, training and test data, and the clients' shares of the training data.

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
        The clients' learning rate in runs that are told nothing about local work.
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
            require(
                isinstance(inputs, Tensor) and isinstance(targets, Tensor),
                f"x{label} and y{label} must be tensors, got {type(inputs).__name__} and {type(targets).__name__}.",
            )
            require(
                targets.ndim == 1 and len(inputs) == len(targets) > 0,
                f"y{label} must hold one label for each of the {len(inputs)} rows of x{label}, "
                f"got shape {tuple(targets.shape)}.",
            )
            require(
                not targets.is_floating_point() and int(targets.min()) >= 0,
                f"y{label} must hold class numbers ≥ 0, got {targets.dtype} with minimum {targets.min().item()}.",
            )
        require(
            isinstance(model, nn.Module) or (callable(model) and not isinstance(model, Tensor)),
            f"model must be an nn.Module or a function that builds one, got {type(model).__name__}.",
        )
        self.name, self.model = name, model
        self.lr = None if lr is None else rate("lr", lr)
        self.about: dict[str, Any] = dict(getattr(clients, "about", {}))
        """How the data were divided, as far as it is known: runs that differ here are different experiments."""
        self.x, self.y, self.x_test, self.y_test = x, y.long(), x_test, y_test.long()
        self.examples, self.offsets = _join(clients, len(x))
        self._copies: dict[torch.device, tuple[Tensor, ...]] = {}
        self._original: Task | None = None
        self._relabelled: list[Task] = []

        probe = self.build(seed=0)
        self.layout = Layout(probe)
        logits = _check_fit(probe, x, "x")
        _check_fit(probe, x_test, "x_test")
        if logits.shape[1] > 1 and bool((logits >= 0).all() and ((logits.sum(dim=1) - 1).abs() < 1e-4).all()):
            warnings.warn(
                f"the outputs of {type(probe).__name__} sum to one, as after a softmax; cross-entropy expects logits, "
                "so leave the softmax away.",
                stacklevel=2,
            )
        labels = int(max(self.y.max(), self.y_test.max())) + 1
        self.num_classes = int(logits.shape[1])
        require(
            self.num_classes >= labels,
            f"model {type(probe).__name__} has {self.num_classes} outputs, but the labels run to {labels - 1}.",
        )
        self.is_random = _is_random(probe, self)
        self.seed_matters = not isinstance(model, nn.Module) and self._differs_by_seed(probe)

    @property
    def num_clients(self) -> int:
        """The number of clients N."""
        return len(self.offsets) - 1

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
                    f"model={name} cannot be called without arguments ({reason(error)}); give a module, or a function "
                    "that builds one."
                ) from error
        require(isinstance(module, nn.Module), f"model() must return an nn.Module, got {type(module).__name__}.")
        # A function that hands out the same module every time must not tie runs and threads together.
        return copy.deepcopy(module)

    def _differs_by_seed(self, probe: nn.Module) -> bool:
        """Whether modules built for two seeds differ in more than their trainable parameters.

        Frozen layers, buffers and plain attributes may; what shows is what the modules compute.
        """
        other = self.build(seed=1)
        self.layout.load(other, self.layout.flatten(probe))
        with torch.no_grad():
            return not torch.equal(probe.eval()(self.x[:2]), other.eval()(self.x[:2]))

    @property
    def data(self) -> tuple[int, ...]:
        """The identity of the tensors: tasks of several seeds often differ in nothing but the split."""
        return id(self.x), id(self.y), id(self.x_test), id(self.y_test)

    @cached_property
    def checksum(self) -> str:
        """A checksum of the data and of who holds what; of the inputs a sample, since hashing all takes a second."""
        samples = [t.reshape(-1)[:: max(1, t.numel() // 100_000)] for t in (self.x, self.x_test)]
        arrays = [t.cpu().contiguous().view(torch.uint8).numpy() for t in (*samples, self.y, self.y_test)]
        return checksum(*arrays, self.examples, self.offsets)

    def bytes_for(self, device: torch.device) -> int:
        """Return the memory that the data will take on a device where they are not yet."""
        if device.type == "cpu" or device in self._copies:
            return 0
        if self._original is not None:
            return self.y.numel() * self.y.element_size() + self._original.bytes_for(device)
        return sum(t.numel() * t.element_size() for t in (self.x, self.y, self.x_test, self.y_test))

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return `x, y, x_test, y_test` on a device, copied there once."""
        if device not in self._copies:
            if self._original is None:
                x, x_test, y_test = (t.to(device) for t in (self.x, self.x_test, self.y_test))
            else:
                x, _, x_test, y_test = self._original.on(device)
            self._copies[device] = x, self.y.to(device), x_test, y_test
        return self._copies[device]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_copies": {}, "_relabelled": []}  # another machine has other devices

    def relabelled(self, y: Tensor) -> Task:
        """Return this task with other training labels; the inputs are shared, on devices too.

        The same labels give the same task, so that runs with it can train side by side.
        """
        for known in self._relabelled:
            if torch.equal(known.y, y):
                return known
        task = copy.copy(self)
        task.y, task._original = y, self
        task.__dict__.pop("checksum", None)
        self._relabelled.append(task)
        return task

    def label_counts(self, clients: ArrayLike | None = None) -> NDArray[np.int64]:
        """Return how many examples of each class each of the clients holds, or of some: ``(clients, classes)``."""
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
    """Return all clients' example indices end to end, and where each client's begin.

    There may be a million clients, so they are checked together, and one by one only to name the one at fault.
    """
    require(
        (clients.ndim == 2 if isinstance(clients, np.ndarray) else isinstance(clients, Sequence)) and len(clients) > 0,
        "clients must be a list with one list of example indices for each client.",
    )
    if isinstance(clients, np.ndarray):
        parts, sizes = [clients.ravel()], np.full(len(clients), clients.shape[1])
    else:
        parts = [np.asarray(part) for part in clients]
        sizes = np.array([part.size for part in parts])
    if not all(part.ndim == 1 and part.size > 0 and part.dtype.kind in "iu" for part in parts):
        raise _fault(clients, num_examples)
    examples = np.concatenate(parts, dtype=np.int64, casting="same_kind")
    if examples.min() < 0 or examples.max() >= num_examples:
        raise _fault(clients, num_examples)
    return examples, np.concatenate([[0], np.cumsum(sizes)])


def _fault(clients: Clients, num_examples: int) -> InvalidInput:
    """Return the error for the first client whose examples cannot be used."""
    for i, part in enumerate(map(np.asarray, clients)):
        if part.ndim != 1 or len(part) == 0:
            return InvalidInput(f"clients[{i}] holds no examples; every client needs one.")
        if part.dtype.kind not in "iu" or part.min() < 0 or part.max() >= num_examples:
            break
    return InvalidInput(f"clients[{i}] must hold indices from 0 to {num_examples - 1}.")


def _check_fit(probe: nn.Module, inputs: Tensor, name: str) -> Tensor:
    """Try the model on two examples; return its logits."""
    before = {key: buffer.clone() for key, buffer in probe.named_buffers()}
    model, shape = type(probe).__name__, tuple(inputs.shape[1:])
    try:
        logits: Any = probe.train()(inputs[:2])
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise InvalidInput(
            f"model {model} does not fit {name}, of shape {shape} and type {inputs.dtype}: {reason(error)}"
        ) from error
    require(
        isinstance(logits, Tensor) and logits.ndim == 2 and len(logits) == len(inputs[:2]),
        f"model {model} must return logits of shape (batch, classes), got {getattr(logits, 'shape', type(logits))}.",
    )
    changed = [key for key, buffer in probe.named_buffers() if not torch.equal(buffer, before[key])]
    norms = [key for key, module in probe.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for key in changed + norms:
        raise InvalidInput(
            f"model {model} depends on statistics of its batches ({key}), which averaging parameters cannot merge; "
            "use GroupNorm or LayerNorm instead."
        )
    fitting: Tensor = logits
    return fitting


def _is_random(probe: nn.Module, task: Task) -> bool:
    """Whether the model's training pass draws random numbers, as dropout does."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        probe.train()(task.x[:2])
        return not torch.equal(before, torch.get_rng_state())
