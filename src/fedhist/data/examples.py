"""Examples that are not in memory as tensors, and those that models are tested on."""

import contextlib
import random
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from fedhist.data.columns import Columns, length, mapped, tensors_of
from fedhist.errors import InvalidInput, brief, reason, require

DRAWING = threading.RLock()
"""Held while examples are fetched and models built, which draw from generators that all threads share."""


def is_dataset(given: object) -> bool:
    """Whether something is a map-style data set, of torchvision's kind or of Hugging Face's."""
    if isinstance(given, (Dataset, DataLoader)):
        return True  # or is refused as one, with a sentence
    plain = (Tensor, np.ndarray, list, tuple, dict, str)
    return (
        hasattr(given, "__getitem__")
        and hasattr(given, "__len__")
        and not isinstance(given, plain)
        and (not hasattr(given, "to_numpy"))
    )


@contextlib.contextmanager
def seeded(seed: int, cuda: Sequence[torch.device] = ()) -> Iterator[None]:
    """Let all that is drawn from PyTorch's, NumPy's and Python's generators follow from a seed, and put them back."""
    with DRAWING, torch.random.fork_rng(devices=list(cuda)):
        before = random.getstate(), np.random.get_state()
        try:
            torch.default_generator.manual_seed(seed)
            for device in cuda:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % (1 << 32))
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


class Items:
    """Map-style data sets, one after the other, whose examples are fetched as they are needed.

    Parameters
    ----------
    datasets
        One for all clients, or one for each.
    target
        The name of the target, where an example is a dict; None where it is a pair ``(x, y)``.
    """

    def __init__(self, datasets: Sequence[Any], target: str | None) -> None:
        for each in datasets:
            fits = hasattr(each, "__len__") and hasattr(each, "__getitem__") and not hasattr(each, "batch_sampler")
            require(
                fits, f"a data set must be map-style, with a length and examples by number, got {type(each).__name__}."
            )
        self.datasets, self.target = datasets, target
        self.starts = np.cumsum([0, *(len(each) for each in datasets)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def fetch(self, index: Sequence[int] | NDArray[np.int64], seed: int) -> tuple[Columns, Tensor]:
        """Return some examples; whatever their transforms draw follows from the seed."""
        with seeded(seed):
            examples = [self._example(int(i)) for i in index]
        try:
            x, y = default_collate(examples)
        except (TypeError, RuntimeError, ValueError) as error:
            raise InvalidInput(
                f"the examples cannot be made one batch: {reason(error)}; give the data set a transform that returns "
                "tensors of one shape."
            ) from error
        if isinstance(x, list):
            x = tuple(x)
        parts = list(x.values()) if isinstance(x, dict) else list(x) if isinstance(x, tuple) else [x]
        odd = next((type(each).__name__ for each in (*parts, y) if not isinstance(each, Tensor)), None)
        require(odd is None, f"the examples hold a {odd} that is no tensor; give the data set a transform, or drop it.")
        if isinstance(x, dict) and len(x) == 1:
            (x,) = x.values()
        return mapped(x, _single), _single(y)

    def _example(self, i: int) -> tuple[Any, Any]:
        which = int(np.searchsorted(self.starts, i, side="right")) - 1
        item = self.datasets[which][i - int(self.starts[which])]
        if self.target is None:
            if not isinstance(item, (tuple, list)) or len(item) != 2:
                raise InvalidInput(
                    f"an example must be a pair (x, y), got {brief(item)}; of a dict, give the target's name as y."
                )
            return item[0], item[1]
        if not isinstance(item, dict) or self.target not in item:
            known = f"with {', '.join(map(str, item))}" if isinstance(item, dict) else f"but {type(item).__name__}"
            raise InvalidInput(f"y={self.target!r} is not in the examples, which are dicts {known}.")
        return {name: each for name, each in item.items() if name != self.target}, item[self.target]

    def tensors(self) -> tuple[Columns, Tensor] | None:
        """Return all examples where they are in memory as tensors already."""
        first = self.datasets[0]
        if len(self.datasets) == 1 and type(first) is TensorDataset and len(first.tensors) == 2:
            return first.tensors[0], first.tensors[1]
        return None

    def labels(self) -> Tensor | None:
        """Return the targets of all examples where they can be had without fetching these."""
        found = []
        for each in self.datasets:
            if getattr(each, "target_transform", None):
                return None  # what it holds is not what it gives
            try:
                # Torchvision has an attribute, and Hugging Face a column.
                labels = torch.as_tensor(each.targets if self.target is None else each[self.target])
            except Exception:  # a data set of any kind, which may have none
                return None
            if labels.ndim != 1 or labels.is_floating_point() or len(labels) != len(each):
                return None
            found.append(labels.long())
        return torch.cat(found)


def _single(values: Tensor) -> Tensor:
    """Return Python's floats as PyTorch has them: in single precision."""
    return values.float() if values.dtype == torch.float64 else values


class TestSet:
    """Examples to test models on, all in memory."""

    __test__ = False  # not for pytest

    def __init__(self, x: Columns, y: Tensor, owner: Tensor | None = None, groups: int = 1) -> None:
        self.x, self.y = x, y
        self.owner = owner
        """Whose each example is, where they are told apart: `groups` clients."""
        self.groups = groups
        self._copies: dict[torch.device, tuple[Columns, Tensor, Tensor | None]] = {}

    def __len__(self) -> int:
        return len(self.y)

    @property
    def identity(self) -> tuple[int, ...]:
        """The identity of the tensors, which tasks of several seeds may share."""
        return *map(id, tensors_of(self.x)), id(self.y), id(self.owner)

    def bytes_for(self, device: torch.device) -> int:
        """Return the memory that copying the examples to a device will take."""
        return 0 if device in self._copies else sum(each.nbytes for each in (*tensors_of(self.x), self.y))

    def on(self, device: torch.device) -> tuple[Columns, Tensor, Tensor | None]:
        """Return inputs, targets and owners on a device, copied there once."""
        if device.type == "cpu":
            return self.x, self.y, self.owner
        if device not in self._copies:
            owner = None if self.owner is None else self.owner.to(device)
            self._copies[device] = mapped(self.x, lambda each: each.to(device)), self.y.to(device), owner
        return self._copies[device]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_copies": {}}  # another machine has other devices


def all_of(name: str, given: Any, target: str | None) -> tuple[Columns, Tensor]:
    """Return all examples of a data set as tensors: a test set is small enough, and the same in every evaluation."""
    items = Items([given], target)
    require(len(items) > 0, f"{name} holds no examples.")
    found = items.tensors()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        x, y = found or items.fetch(range(len(items)), seed=0)
    require(length(x) == len(y), f"{name} holds {length(x)} inputs and {len(y)} targets.")
    return x, y
