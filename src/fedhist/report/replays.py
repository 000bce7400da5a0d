"""The tables of a replay."""

from __future__ import annotations

from collections.abc import Sequence

from fedhist.simulation.replay import Replay

Cells = tuple[list[str], list[list[str]]]
"""The names of columns, and rows."""


def _said(form: str, value: float | None) -> str:
    return "–" if value is None else form.format(value)


def _ratio(value: float | None, of: float | None) -> float | None:
    return value / of if value is not None and of else None


def differences(replays: Sequence[Replay]) -> Cells:
    """Return how each strategy differs from the recorded one.

    Weights moved is the total variation distance, in percent of all weight. Lengths are in multiples of the recorded
    updates', and how far apart the models end in multiples of how far the recorded one went.
    """
    rows = []
    for each in replays:
        told = each.summary()
        rows.append(
            [
                each.method,
                _said("{:.1f} %", _ratio(told["weight_distance"], 0.01)),
                _said("{:.2f}", told["weight_correlation"]),
                _said("{:.3f}", told["cosine"]),
                _said("{:.3f}", told["lowest_cosine"]),
                _said("× {:.2f}", _ratio(told["norm"], told["recorded_norm"])),
                _said("× {:.2f}", _ratio(told["final_distance"], told["recorded_travelled"])),
            ]
        )
    return ["strategy", "weights moved", "corr.", "cosine", "lowest", "length", "models apart"], rows


def weights_by_staleness(replays: Sequence[Replay]) -> Cells:
    """Return the mean weight of uploads by their staleness, recorded and of each strategy."""
    rows = []
    for groups in zip(*(each.by_staleness() for each in replays), strict=True):
        low, high, uploads = (groups[0][name] for name in ("from", "to", "uploads"))
        weights = [groups[0]["recorded_weight"], *(group["weight"] for group in groups)]
        span = f"{low}" if low == high else f"{low}-{high}"
        rows.append([span, f"{uploads:,}", *(_said("{:.4f}", weight) for weight in weights)])
    names = [f"{replays[0].recorded} (recorded)", *(each.method for each in replays)]
    return ["staleness", "uploads", *names], rows
