"""Where to look for good options: the points of a grid, its ends, and how many candidates are worth more rounds."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate, product
from typing import Any

FRACTIONS = (1 / 9, 1 / 3, 1.0)
"""Shares of the rounds after which candidates are compared; a shorter run says too little about a whole one."""
KEPT = 1 / 3
"""Share of the candidates that go on to the next comparison, but not fewer than two: one has nothing to win."""
DIGITS = 3
"""Digits of a value that is not on the grid that was given."""

Point = tuple[Any, ...]
"""A candidate: one value for each axis of a grid."""
Axes = Mapping[str, Sequence[Any]]
"""The values of each option, those of a range in order."""


def points(axes: Axes) -> list[Point]:
    """Return all candidates of a grid."""
    return list(product(*axes.values()))


def is_range(values: Sequence[Any]) -> bool:
    """Return whether there are values beyond these: numbers, at least two of them."""
    return len(values) > 1 and all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in values)


def ends(axes: Axes, point: Point) -> dict[str, int]:
    """Return the options of a point at an end of their range, with 1 for the upper end and -1 for the lower."""
    found = {}
    for (name, values), own in zip(axes.items(), point, strict=True):
        if is_range(values) and not min(values) < own < max(values):
            found[name] = 1 if own >= max(values) else -1
    return found


def beyond(values: Sequence[Any], side: int) -> Any:
    """Return the value beyond an end of a range, as far as the last step to it; None where there is none.

    Steps of positive numbers are factors, those of others differences.
    """
    ordered = sorted(values, reverse=side < 0)
    before, last = ordered[-2:]
    value = last * (last / before) if min(values) > 0 else last + (last - before)
    return _like(values, value, ordered)


def between(values: Collection[Any], own: Any) -> list[Any]:
    """Return the values half-way from one value to its neighbours, as factors where all are positive."""
    if not is_range(ordered := sorted(values)):
        return []
    place = ordered.index(own)
    near = [ordered[each] for each in (place - 1, place + 1) if 0 <= each < len(ordered)]
    halves = [math.sqrt(own * each) if ordered[0] > 0 else (own + each) / 2 for each in near]
    made = [_like(ordered, half, ordered) for half in halves]
    return [each for each in made if each is not None]


def _like(values: Sequence[Any], value: float, taken: Collection[Any]) -> Any:
    """Return a new value of the kind that a range has, None where it is one of it already or too large or small."""
    whole = all(isinstance(each, int) for each in values)
    made = round(value) if whole else float(f"{value:.{DIGITS}g}")
    return made if made not in taken and math.isfinite(made) and (made > 0 or min(values) <= 0) else None


def further(axes: Axes, best: Point, at: Mapping[str, int], possible: Callable[[Point], bool]) -> list[Point]:
    """Return the candidates beyond some ends that the best one lies at: one for each of them, and one for all."""
    steps = {name: value for name, side in at.items() if (value := beyond(axes[name], side)) is not None}
    made = [_with(axes, best, {name: value}) for name, value in steps.items()]
    if len(steps) > 1:
        made.append(_with(axes, best, steps))
    return [point for point in made if possible(point)]


def nearer(axes: Axes, best: Point, tried: Collection[Point], possible: Callable[[Point], bool]) -> list[Point]:
    """Return candidates half a step from the best one that have not been tried."""
    made = []
    for place, name in enumerate(axes):
        made += [_with(axes, best, {name: half}) for half in between({point[place] for point in tried}, best[place])]
    return [point for point in made if point not in tried and possible(point)]


def _with(axes: Axes, point: Point, values: Mapping[str, Any]) -> Point:
    return tuple(values.get(name, own) for name, own in zip(axes, point, strict=True))


def survivors(count: int, costs: Sequence[int], left: int) -> int:
    """Return how many of so many candidates go on, given what each of the live ones costs, the best first; 0 for none.

    Two at least: taking the best one alone further would cost and decide nothing.
    """
    wanted = costs[: max(2, int(KEPT * count))]
    fits = sum(total <= left for total in accumulate(wanted))
    return fits if fits >= 2 else 0
