"""One evaluation of a model, and the columns that many of them make."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar, overload

from fedhist.errors import require
from fedhist.store.measure import ACCURACY, LOSS
from fedhist.store.tables import LARGEST

LARGEST_METRIC = 1e15
"""A deployment may report anything, and means and spreads are taken of it; what is larger is not known."""
T = TypeVar("T")


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of the global model, after `round` rounds."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    round: int
    time: float
    """Virtual time."""
    accuracy: float | None
    """None where it is not a metric of the task."""
    loss: float | None
    """None where a deployment does not evaluate it, and where it is NaN or infinite."""
    per_class: list[float | None]
    mean_staleness: float
    """Over the uploads since the evaluation before."""
    max_staleness: int
    epsilon: float | None = None
    """Privacy spent so far (see :class:`Private`); None, and not written, without a privacy guarantee."""
    metrics: dict[str, float | None] | None = None
    """All metrics by name but for accuracy and loss; None, and not written, where there are none."""

    def value(self, name: str) -> float | None:
        """Return a metric, accuracy and loss among them; None where it is NaN or was not evaluated."""
        if name in (ACCURACY, LOSS):
            return self.accuracy if name == ACCURACY else self.loss
        return (self.metrics or {}).get(name)


TAKEN = {"path", "file", "allow_pickle", *Evaluation.__dataclass_fields__} - {ACCURACY, LOSS}
"""Names that a metric cannot have: they mean something else in a history or its files."""


class Column(Generic[T]):
    """One value of every evaluation of a history, as its attribute."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, history: None, owner: type) -> Self: ...
    @overload
    def __get__(self, history: Any, owner: type) -> list[T]: ...
    def __get__(self, history: Any, owner: type) -> Self | list[T]:
        return self if history is None else [getattr(each, self.name) for each in history.evaluations]


def check_evaluations(evaluations: Sequence[Evaluation], rounds: int) -> None:
    """Raise unless evaluations are of rounds there were, each of a later one, with numbers that can be averaged."""
    evaluated = [0, *(each.round for each in evaluations)]
    ordered = evaluated == sorted(set(evaluated)) and evaluated[-1] <= rounds
    require(ordered, f"its evaluations are not of rounds from 1 to {rounds}, in order")
    for each in evaluations:
        numbers = [each.mean_staleness, each.max_staleness]
        numbers += [v for v in (each.accuracy, *each.per_class, *(each.metrics or {}).values()) if v is not None]
        plausible = abs(each.time) <= LARGEST and max(map(abs, numbers)) <= LARGEST_METRIC
        require(plausible, f"its evaluation after round {each.round} holds absurd numbers")
