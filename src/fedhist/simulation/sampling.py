"""Candidates that Optuna proposes, batch by batch, instead of those of a grid."""

from collections.abc import Sequence
from typing import Any

from fedhist.errors import InvalidInput
from fedhist.simulation.search import DIGITS, Axes, Point, is_range

BATCHES = 3
"""Times that candidates are asked for: those of the later batches follow from how the earlier ones did."""


class Sampler:
    """Optuna's tree-structured Parzen estimator over the ranges of a grid, with its ask-and-tell interface.

    Parameters
    ----------
    axes
        Numbers stand for all from the least to the largest of them, on a logarithmic scale if they are positive; other
        values for themselves.
    batch
        Candidates at a time; the first batch is random.
    """

    def __init__(self, axes: Axes, batch: int, seed: int) -> None:
        try:
            import optuna  # noqa: PLC0415 (an extra)
        except ImportError:
            raise InvalidInput("search='optuna' needs Optuna: pip install 'fedhist[optuna]'") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=max(1, batch))
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._distributions: dict[str, Any] = {}
        for name, values in axes.items():
            if not is_range(values):
                self._distributions[name] = optuna.distributions.CategoricalDistribution(list(values))
                continue
            whole = all(isinstance(each, int) for each in values)
            kind = optuna.distributions.IntDistribution if whole else optuna.distributions.FloatDistribution
            self._distributions[name] = kind(min(values), max(values), log=min(values) > 0)
        self._asked: list[Any] = []
        self._worst = 0.0

    def ask(self, count: int) -> list[Point]:
        """Return the next candidates."""
        self._asked = [self._study.ask(self._distributions) for _ in range(count)]
        return [tuple(_short(trial.params[name]) for name in self._distributions) for trial in self._asked]

    def tell(self, values: Sequence[float | None], higher: bool) -> None:
        """Report how good the last candidates were; one that diverged is as bad as the worst so far."""
        signed = [None if value is None else value if higher else -value for value in values]
        self._worst = min([self._worst, *(value for value in signed if value is not None)])
        for trial, value in zip(self._asked, signed, strict=True):
            self._study.tell(trial, self._worst if value is None else value)


def _short(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
