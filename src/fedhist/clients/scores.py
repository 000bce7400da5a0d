"""How well models do: sums over test examples, from which losses and metrics follow."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fedhist.data.metrics import whole_value
from fedhist.data.task import Task
from fedhist.store.history import LOSS

Kept = tuple[tuple[Tensor, Tensor, Tensor | None], ...]
COUNT = "examples"


@dataclass(frozen=True)
class Score:
    """What is known of a model's outputs for some examples, for each group of them: scores of parts add up.

    As :func:`measured` returns it, it is that of several models, along the first axis of sums, classes and outputs.
    """

    task: Task
    sums: Mapping[str, Tensor]
    """``(groups, terms)``, float64: the number of examples, their losses, and the terms of metrics that are sums."""
    classes: Tensor | None
    """``(2, classes)``, float64: how many examples of each class there are, and how many are classified correctly."""
    outputs: Kept = ()
    """Outputs, targets and groups, part by part, where a metric needs all of them."""

    def each(self) -> list[Self]:
        """Return the score of each of several models, on the CPU."""
        sums = {name: each.cpu() for name, each in self.sums.items()}
        classes = None if self.classes is None else self.classes.cpu()
        return [
            type(self)(
                self.task,
                {name: each[i] for name, each in sums.items()},
                None if classes is None else classes[i],
                tuple((outputs[i], y, owner) for outputs, y, owner in self.outputs),
            )
            for i in range(len(sums[COUNT]))
        ]

    def __add__(self, other: Self) -> Self:
        """Return the score on the examples of both."""
        classes = None if self.classes is None or other.classes is None else self.classes + other.classes
        sums = {name: each + other.sums[name] for name, each in self.sums.items()}
        return type(self)(self.task, sums, classes, self.outputs + other.outputs)

    @property
    def loss(self) -> float:
        """The mean loss."""
        return self.values()[LOSS]

    @property
    def per_class(self) -> list[float | None]:
        """The accuracy on each class; None for a class without examples."""
        if self.classes is None:
            return []
        return [c / n if n else None for n, c in zip(*self.classes.tolist(), strict=True)]

    def values(self, group: int = 0) -> dict[str, float]:
        """Return the mean loss and every metric of a group, which is all examples where there are no groups."""
        sums = {name: each[group].tolist() for name, each in self.sums.items()}
        count = sums[COUNT][0]
        values = {LOSS: sums[LOSS][0] / count if count else math.nan}
        for metric in self.task.metrics:
            if not count:
                values[metric.name] = math.nan
            elif metric.value is not None:
                values[metric.name] = metric.value(sums[metric.name])
            else:
                values[metric.name] = whole_value(metric, *self._whole(group))
        return values

    def _whole(self, group: int) -> tuple[Tensor, Tensor]:
        parts = [(o, y) if own is None else (o[own == group], y[own == group]) for o, y, own in self.outputs]
        return torch.cat([o for o, _ in parts]), torch.cat([y for _, y in parts])


def measured(task: Task, outputs: Tensor, y: Tensor, owner: Tensor | None = None, groups: int = 1) -> Score:
    """Return the score of several models, given their outputs for the same examples, ``(models, examples, …)``.

    With `owner`, the group of each example, of which there are `groups`, every group has sums of its own.
    """
    if len(outputs) == 1:  # also what vmap does not support
        terms = {name: each[None] for name, each in _terms(task, outputs[0], y).items()}
    else:
        terms = torch.func.vmap(lambda each: _terms(task, each, y))(outputs)
    if owner is None:
        sums = {name: each.sum(dim=1, keepdim=True) for name, each in terms.items()}
    else:  # on the CPU, since adding up by index is in no fixed order on a GPU
        whose = owner.cpu()
        sums = {
            name: each.new_zeros((len(each), groups, each.shape[2]), device="cpu").index_add_(1, whose, each.cpu())
            for name, each in terms.items()
        }
    classes = None
    if task.num_classes:
        right = (outputs.argmax(dim=-1) == y).double()  # counts are exact, in whatever order they are added up
        counted = torch.stack([torch.ones_like(right), right], dim=1)
        classes = counted.new_zeros((len(outputs), 2, task.num_classes)).index_add_(2, y, counted)
    whole = any(metric.rows is None for metric in task.metrics)
    return Score(task, sums, classes, ((outputs, y, owner),) if whole else ())


def _terms(task: Task, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return what each example adds to the sums, ``(examples, terms)`` each."""
    losses = task.loss(outputs, y).double()
    terms = {COUNT: torch.ones_like(losses)[:, None], LOSS: losses[:, None]}
    return terms | {each.name: each.rows(outputs, y).double() for each in task.metrics if each.rows is not None}
