"""How well a model does, in numbers with names: built in, or any function or torchmetrics object."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedhist.data.losses import IGNORED, cross_entropy
from fedhist.errors import InvalidInput, brief, reason, require, unknown
from fedhist.store.evaluation import TAKEN
from fedhist.store.measure import LOSS

Rows = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Metric:
    """A number that says how well a model does on some examples.

    Where it is a function of sums over examples, `rows` gives the terms, ``(examples, terms)``, and `value` the
    number from their sums; such a metric never needs all outputs at once. Any other is `whole`: a function of all
    outputs and targets.
    """

    name: str
    higher: bool
    """Whether more is better."""
    rows: Rows | None = None
    value: Callable[[list[float]], float] | None = None
    whole: Callable[[Tensor, Tensor], float] | None = None


def _ratio(sums: list[float]) -> float:
    return sums[0] / sums[1] if sums[1] else math.nan


def _pair(value: Tensor, count: Tensor) -> Tensor:
    """Return a sum over each example's places and how many these are."""
    return torch.stack([each.flatten(1).sum(1) if each.ndim > 1 else each for each in (value, count)], dim=1)


def hits(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return which predictions are right: classes by their largest logit, labels of their own by the logit's sign."""
    if _has_labels(outputs, targets):
        return ((outputs.reshape(targets.shape) > 0) == (targets > 0.5)).double()
    return (outputs.argmax(dim=-1) == targets).double()


def _has_labels(outputs: Tensor, targets: Tensor) -> bool:
    """Whether each output is a label of its own, with a target of 0 or 1, rather than one of several classes."""
    return targets.is_floating_point() or outputs.ndim == targets.ndim


def _counted(targets: Tensor) -> Tensor:
    return (targets != IGNORED).double()


def _accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return _pair(hits(outputs, targets) * _counted(targets), _counted(targets))


def _top5(outputs: Tensor, targets: Tensor) -> Tensor:
    best = outputs.topk(min(5, outputs.shape[-1]), dim=-1).indices
    return _pair((best == targets[..., None]).any(dim=-1).double() * _counted(targets), _counted(targets))


def _perplexity(outputs: Tensor, targets: Tensor) -> Tensor:
    count = _counted(targets).flatten(1).sum(1) if targets.ndim > 1 else _counted(targets)
    return torch.stack([cross_entropy(outputs, targets).double() * count, count], dim=1)


def _absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    error = (outputs.reshape(targets.shape).double() - targets).abs()
    return _pair(error, torch.ones_like(error))


def _squared(outputs: Tensor, targets: Tensor) -> Tensor:
    error = (outputs.reshape(targets.shape).double() - targets).square()
    return _pair(error, torch.ones_like(error))


def _root(sums: list[float]) -> float:
    return math.sqrt(_ratio(sums))


def _f1(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return, class by class, whether an example is a true positive, predicted, and there."""
    if _has_labels(outputs, targets):
        shape = (len(targets), -1)
        seen, there = (outputs.reshape(shape) > 0).double(), (targets.reshape(shape) > 0.5).double()
    else:
        classes = torch.arange(outputs.shape[-1], device=outputs.device)
        seen, there = ((each[..., None] == classes).double() for each in (outputs.argmax(dim=-1), targets))
        if targets.ndim > 1:
            counted = _counted(targets)[..., None]
            terms = (seen * there * counted, seen * counted, there * counted)
            return torch.cat([each.flatten(1, -2).sum(1) for each in terms], dim=1)
    return torch.cat([seen * there, seen, there], dim=1)


def _macro_f1(sums: list[float]) -> float:
    """Return the mean over the classes that occur or are predicted of 2·TP / (predicted + there)."""
    third = len(sums) // 3
    parts = zip(sums[:third], sums[third : 2 * third], sums[2 * third :], strict=True)
    scores = [2 * both / (seen + there) for both, seen, there in parts if seen + there > 0]
    return sum(scores) / len(scores) if scores else math.nan


def auc(outputs: Tensor, targets: Tensor) -> float:
    """Return the area under the ROC curve, the mean over labels that have examples of both kinds."""
    if _has_labels(outputs, targets):
        scores, there = outputs.reshape(len(targets), -1), targets.reshape(len(targets), -1) > 0.5
    elif outputs.shape[-1] == 2:
        scores, there = outputs[..., 1:].reshape(-1, 1) - outputs[..., :1].reshape(-1, 1), targets.reshape(-1, 1) == 1
    else:  # one class against the others
        scores = torch.softmax(outputs, dim=-1).reshape(-1, outputs.shape[-1])
        there = targets.reshape(-1, 1) == torch.arange(outputs.shape[-1], device=targets.device)
    areas = []
    for score, positive in zip(scores.double().T, there.T, strict=True):
        count = int(positive.sum())
        if 0 < count < len(positive):
            _, place, repeated = torch.unique(score, return_inverse=True, return_counts=True)
            ranks = (torch.cumsum(repeated, 0) - (repeated - 1) / 2)[place]  # the mean rank of equal scores
            area = (float(ranks[positive].sum()) - count * (count + 1) / 2) / (count * (len(positive) - count))
            areas.append(area)
    return sum(areas) / len(areas) if areas else math.nan


def _exp_ratio(sums: list[float]) -> float:
    return math.exp(min(_ratio(sums), 700.0))


METRICS: Mapping[str, Metric] = {
    each.name: each
    for each in (
        Metric("accuracy", True, _accuracy, _ratio),
        Metric("top-5", True, _top5, _ratio),
        Metric("perplexity", False, _perplexity, _exp_ratio),
        Metric("mae", False, _absolute, _ratio),
        Metric("mse", False, _squared, _ratio),
        Metric("rmse", False, _squared, _root),
        Metric("f1", True, _f1, _macro_f1),
        Metric("auc", True, whole=auc),
    )
}


def as_metrics(given: object) -> list[Metric]:
    """Return the metrics that names, functions and torchmetrics objects mean, or a single one of them."""
    if isinstance(given, (str, Metric)) or (callable(given) and not isinstance(given, (Mapping, type))):
        given = [given]
    if isinstance(given, bytes) or not isinstance(given, (Sequence, Mapping)):
        raise InvalidInput(f"metrics must be a list of metrics or a dict of them by name, got {brief(given)}.")
    named = given.items() if isinstance(given, Mapping) else [(None, each) for each in given]
    metrics = [_metric(each, name) for name, each in named]
    names = [each.name for each in metrics]
    for name in names:
        require(names.count(name) == 1, f"metrics has {name} twice; give them names: metrics={{'name': metric}}.")
        fits = name not in ("", LOSS, *TAKEN) and "/" not in name and len(name) <= 100
        require(fits, f"a metric cannot be called {name!r}; give it a name: metrics={{'name': metric}}.")
    return metrics


def _metric(given: Any, name: str | None) -> Metric:
    if isinstance(given, str):
        if given not in METRICS:
            raise unknown("metric", given, METRICS)
        known = METRICS[given]
        return known if name is None else Metric(name, known.higher, known.rows, known.value, known.whole)
    if isinstance(given, Metric):
        return given
    require(callable(given) and not isinstance(given, type), f"a metric must be a name or a function, got {given!r}.")
    label = name or str(getattr(given, "__name__", type(given).__name__))
    higher = getattr(given, "higher_is_better", None)
    if hasattr(given, "update") and hasattr(given, "compute"):
        return Metric(label, higher is not False, whole=_from_torchmetrics(given))
    return Metric(label, higher is not False, whole=given)


def _from_torchmetrics(metric: Any) -> Callable[[Tensor, Tensor], float]:
    def whole(outputs: Tensor, targets: Tensor) -> float:
        own = copy.deepcopy(metric).to(outputs.device)
        own.reset()
        try:
            own.update(outputs, targets)
        except ValueError:  # classification takes labels as integers, which losses such as bce take as numbers
            if not targets.is_floating_point() or not torch.equal(targets, targets.round()):
                raise
            own.update(outputs, targets.long())
        return float(own.compute())

    return whole


def whole_value(metric: Metric, outputs: Tensor, targets: Tensor) -> float:
    """Return a metric of all outputs, or raise unless it is one number."""
    assert metric.whole is not None
    try:
        return float(metric.whole(outputs, targets))
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise InvalidInput(f"metric {metric.name} cannot be computed: {reason(error)}.") from error
