"""The tables of a replay."""

from collections.abc import Sequence

from fedhist.report.figure import Table
from fedhist.simulation.replay import Replay


def _text(form: str, value: float | None, unit: float | None = 1.0) -> str:
    """Return a number in multiples of a unit; a dash where one of the two is not known."""
    return form.format(value / unit) if value is not None and unit else "–"


def differences(replays: Sequence[Replay]) -> Table:
    """Return how each strategy differs from the recorded one.

    Weights moved is the total variation distance, in percent of all weight. Lengths are in multiples of the recorded
    updates', and how far apart the models end in multiples of how far the recorded one went.
    """
    rows = []
    for each in replays:
        facts = each.summary()
        weights = _text("{:.1f} %", facts["weight_distance"], 0.01), _text("{:.2f}", facts["weight_correlation"])
        cosines = _text("{:.3f}", facts["cosine"]), _text("{:.3f}", facts["lowest_cosine"])
        length = _text("× {:.2f}", facts["norm"], facts["recorded_norm"])
        apart = _text("× {:.2f}", facts["final_distance"], facts["recorded_travelled"])
        rows.append([each.method, *weights, *cosines, length, apart])
    return Table(["strategy", "weights moved", "corr.", "cosine", "lowest", "length", "models apart"], rows)


def weights_by_staleness(replays: Sequence[Replay]) -> Table:
    """Return the mean weight of uploads by their staleness, recorded and of each strategy."""
    rows = []
    for groups in zip(*(each.by_staleness() for each in replays), strict=True):
        low, high, uploads = (groups[0][name] for name in ("from", "to", "uploads"))
        weights = [groups[0]["recorded_weight"], *(group["weight"] for group in groups)]
        span = f"{low}" if low == high else f"{low}-{high}"
        rows.append([span, f"{uploads:,}", *(_text("{:.4f}", weight) for weight in weights)])
    names = [f"{replays[0].recorded} (recorded)", *(each.method for each in replays)]
    return Table(["staleness", "uploads", *names], rows)
