"""An evaluation as named numbers, the same for every tool that keeps them."""

from collections.abc import Iterator, MutableMapping, Sequence

from fedhist.store.events import count_until
from fedhist.store.history import Evaluation, History

Seen = MutableMapping[str, int]
"""How many evaluations of each run, by its `id`, have been returned already."""


def figures(history: History, evaluation: Evaluation) -> dict[str, float]:
    """Return an evaluation as named numbers, without those that are not known."""
    known = {
        "accuracy": evaluation.accuracy,
        "loss": evaluation.loss,
        **(evaluation.metrics or {}),
        "virtual_time": evaluation.time,
        "staleness/mean": evaluation.mean_staleness,
        "staleness/max": evaluation.max_staleness,
        "uploads/rejected": count_until(history.events, "rejected", evaluation.round),
        "uploads/dropped": count_until(history.events, "dropped", evaluation.round),
        "epsilon": evaluation.epsilon,
        **{f"class_accuracy/{label:03d}": value for label, value in enumerate(evaluation.per_class)},
    }
    return {name: float(value) for name, value in known.items() if value is not None}


def fresh(histories: Sequence[History], seen: Seen) -> Iterator[tuple[History, list[Evaluation]]]:
    """Return the evaluations that were not returned before, run by run, and count them as seen."""
    for history in histories:
        if new := history.evaluations[seen.get(history.id, 0) :]:
            yield history, new
            seen[history.id] = len(history.evaluations)
