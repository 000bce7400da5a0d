"""The league's tables and its picture: what may be concluded from the runs of all methods in all settings."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedhist.clients.objectives import uses_mail
from fedhist.looks import looks
from fedhist.paper.league import BASELINE, Choice, Entrant, Setting
from fedhist.paper.tables import final, markdown, mean_and_spread, rare_accuracy
from fedhist.report.curves import drawing
from fedhist.simulation.methods import as_method
from fedhist.store.recording import in_units
from fedhist.store.statistics import half_width, paired, paired_with
from fedhist.strategies.memory import buffer_bytes

SIGNIFICANT, NEAR = 0.05, 2.0
"""Level with the best are methods whose p-value is not below the first, and at most so many points behind."""
FURTHEST = 15.0
"""Points behind the best at which the picture ends: small differences must stay visible."""
TARGET_SHARE = 0.9
"""Share of the baseline's final accuracy that the time is taken to."""
OURS = ("Nowcast", "FedHist")
"""The methods that tables and the picture highlight."""

Result = Mapping[str, Any]
Seeds = Mapping[int, float]


@dataclass(frozen=True)
class Played:
    """A setting with what its methods chose and achieved, by their names; only of those that have all their seeds."""

    setting: Setting
    entrants: Mapping[str, Entrant]
    choices: Mapping[str, Choice]
    runs: Mapping[str, Mapping[int, Result]]
    """By method and seed."""

    @cached_property
    def scores(self) -> dict[str, dict[int, float]]:
        """The final accuracy of each method that is ranked, by seed."""
        return self.measured(final)

    def measured(self, measure: Callable[[Result], float]) -> dict[str, dict[int, float]]:
        """Return a measure of each method that is ranked, by seed."""
        ranked = {name: runs for name, runs in self.runs.items() if self.entrants[name].ranked}
        return {name: {seed: measure(run) for seed, run in runs.items()} for name, runs in ranked.items()}

    @property
    def target(self) -> float | None:
        """The accuracy that the time is taken to, as a share; None without the baseline."""
        base = self.runs.get(BASELINE)
        return None if base is None else TARGET_SHARE * statistics.fmean(map(final, base.values())) / 100


def best_of(scores: Mapping[str, Seeds]) -> str:
    """Return the method with the best mean over seeds."""
    return max(scores, key=lambda name: statistics.fmean(scores[name].values()))


def level(scores: Mapping[str, Seeds]) -> set[str]:
    """Return the methods near the best and not significantly worse: paired t-tests over seeds, Holm's correction.

    Near is a mean distance of at most :data:`NEAR` points, since a method with a failed seed is never significantly
    worse. The best itself is among them; without at least two seeds it is alone.
    """
    best = best_of(scores)
    tests = paired_with(best, scores)
    return {best, *(name for name, test in tests.items() if test.corrected >= SIGNIFICANT and test.mean <= NEAR)}


def everywhere(season: Sequence[Played]) -> list[str]:
    """Return the ranked methods that took part in all settings: ranks and means over settings are of these."""
    return [name for name in season[0].scores if all(name in played.scores for played in season)]


def nearly_everywhere(season: Sequence[Played]) -> list[str]:
    """Return the ranked methods that missed at most one setting in ten: means over settings tell something of these."""
    met = Counter(name for played in season for name in played.scores)
    return [name for name, count in met.items() if len(season) - count <= len(season) // 10]


def behind(season: Sequence[Played], name: str) -> list[dict[int, float]]:
    """Return how many points a method is behind the best of each setting it took part in, by seed."""
    gaps = []
    for played in season:
        if name in played.scores:
            best = played.scores[best_of(played.scores)]
            gaps.append({seed: best[seed] - value for seed, value in played.scores[name].items() if seed in best})
    return gaps


def mean_behind(gaps: Sequence[Seeds]) -> tuple[float, float | None]:
    """Return the mean over settings and half its 95 % interval over seeds."""
    common = set.intersection(*(set(each) for each in gaps))
    by_seed = [statistics.fmean(each[seed] for each in gaps) for seed in sorted(common)]
    return statistics.fmean(by_seed), half_width(by_seed)


def mean_ranks(season: Sequence[Played]) -> dict[str, float]:
    """Return the mean rank over settings, 1 the best, of the methods that took part in all; equal ones share ranks."""
    from scipy import stats  # noqa: PLC0415 (a second to import)

    names = everywhere(season)
    if not names:
        return {}
    means = [[statistics.fmean(played.scores[name].values()) for name in names] for played in season]
    return dict(zip(names, stats.rankdata(-np.array(means), axis=1).mean(axis=0).tolist(), strict=True))


def critical_difference(methods: int, settings: int) -> float:
    """Return by how much mean ranks must differ to be told apart: Nemenyi's test (Demšar, 2006)."""
    from scipy import stats  # noqa: PLC0415

    quantile = stats.studentized_range.ppf(1 - SIGNIFICANT, methods, np.inf) / np.sqrt(2)
    return float(quantile * np.sqrt(methods * (methods + 1) / (6 * settings)))


def in_order(season: Sequence[Played]) -> list[str]:
    """Return all ranked methods: those that missed hardly a setting by their distance to the best, then the others."""
    complete = nearly_everywhere(season)
    listed = list(dict.fromkeys(name for played in season for name in played.scores))
    first = sorted(complete, key=lambda name: mean_behind(behind(season, name))[0])
    return [*first, *(name for name in listed if name not in complete)]


def _costs(season: Sequence[Played], name: str) -> list[tuple[str, str]]:
    """Return headings and texts: the server's memory for each number of clients, and the bytes of a client's update.

    They are those of the model that comes first. A method that was not asked for has none: its class is not imported.
    """
    first = season[0].setting
    same = [each for each in season if (each.setting.dataset, each.setting.k) == (first.dataset, first.k)]
    numbers = sorted({played.setting.clients for played in same})
    headings = [*(f"server state, N = {n:,}" for n in numbers), "sent per update"]
    sizes = {r["parameters"] for played in same for runs in played.runs.values() for r in runs.values()}
    entrant = next(played.entrants[name] for played in season if name in played.entrants)
    texts = ["–"] * len(headings)
    if entrant.listed:
        methods, size = [as_method(entrant.spec_at(n // first.k)) for n in numbers], max(sizes)
        memory = [
            buffer_bytes(method.strategy, n, first.k, size, torch.float32)
            for n, method in zip(numbers, methods, strict=True)
        ]
        vectors = 4 if uses_mail(methods[0].objective) else 2  # the model down and the change up; mail doubles both
        texts = [*map(in_units, memory), in_units(vectors * size * torch.float32.itemsize)]
    return list(zip(headings, texts, strict=True))


def summary(season: Sequence[Played]) -> str:
    """Return one line a method: points behind the best, ranks, and what it costs."""
    ranks, rows, header = mean_ranks(season), [], list[str]()
    good = [level(played.scores) for played in season]
    for name in in_order(season):
        gaps = behind(season, name)
        mean, half = mean_behind(gaps)
        worst = max(statistics.fmean(each.values()) for each in gaps)
        rank = f"{ranks[name]:.1f}" if name in ranks else "–"
        span = "" if half is None else f" ± {half:.1f}"
        costs = _costs(season, name)
        tested = [run for played in season for run in played.runs.get(name, {}).values()]
        diverged = f"{sum(run['diverged'] for run in tested)} of {len(tested)}"
        header = ["method", "points behind the best", "at worst", "mean rank", "best or level", "diverged"]
        header += [heading for heading, _ in costs]
        shown = f"**{name}**" if name in OURS else name
        count = f"{sum(name in each for each in good)} of {len(gaps)}"
        rows.append([shown, f"{mean:.1f}{span}", f"{worst:.1f}", rank, count, diverged, *(text for _, text in costs)])
    lines = markdown(header, rows)
    if len(ranks) > 1 and len(season) > 1:
        critical = critical_difference(len(ranks), len(season))
        lines += [
            "",
            f"Mean ranks less than {critical:.1f} apart are not told apart (Nemenyi, {len(season)} settings).",
        ]
    return "\n".join(lines)


def accuracy(season: Sequence[Played]) -> str:
    """Return each method's mean accuracy in each setting: the best bold, those level with it in italics."""
    columns = []
    for played in season:
        scores = played.scores
        best, good = best_of(scores), level(scores)
        marks = {name: "**" if name == best else "*" if name in good else "" for name in scores}
        means = {name: f"{statistics.fmean(own.values()):.1f}" for name, own in scores.items()}
        columns.append({name: f"{marks[name]}{mean}{marks[name]}" for name, mean in means.items()})
    rows = [[name, *(column.get(name, "–") for column in columns)] for name in in_order(season)]
    return "\n".join(markdown(["method", *(played.setting.title for played in season)], rows))


def rates(season: Sequence[Played]) -> str:
    """Return the rates that were chosen, client × server; an arrow where a better one may lie beyond the range."""
    names = [*in_order(season), *_paced(season)]

    def text(choice: Choice | None) -> str:
        if choice is None:
            return "–"
        client, server = choice.ends()
        return f"{choice.lr:g}{client} × {choice.server_lr:g}{server}"

    rows = [[name, *(text(played.choices.get(name)) for played in season)] for name in names]
    return "\n".join(markdown(["method", *(played.setting.title for played in season)], rows))


def time_to(result: Result, target: float) -> float:
    """Return the virtual time to an accuracy, infinity if it is not reached; between evaluations by a straight line."""
    earlier: tuple[float, float] | None = None
    for now, value in zip(result["time"], result["accuracy"], strict=False):
        if value >= target:
            if earlier is None:
                return float(now)
            before, lower = earlier
            return float(before + (now - before) * (target - lower) / (value - lower))
        earlier = now, value
    return float("inf")


def _times(runs: Iterable[Result], target: float) -> str:
    """Return the mean time to a target over the seeds that reach it, and how many do not."""
    found = [time_to(result, target) for result in runs]
    reached = [value for value in found if value < float("inf")]
    missed = f" ({len(found) - len(reached)} never)" if 0 < len(reached) < len(found) else ""
    return f"{_amount(reached)}{missed}" if reached else "never"


def _amount(values: Sequence[float]) -> str:
    """Return a mean with the digits that matter."""
    mean = statistics.fmean(values)
    return f"{mean:,.0f}" if mean >= 100 else f"{mean:.1f}"


def _paced(season: Sequence[Played]) -> list[str]:
    """Return the methods that differ from others in pace only."""
    found = (name for played in season for name in played.runs if not played.entrants[name].ranked)
    return list(dict.fromkeys(found))


def times(season: Sequence[Played]) -> str:
    """Return the virtual time to nine tenths of the baseline's final accuracy."""
    timed = [(played, played.target) for played in season if played.target is not None]
    if not timed:
        return ""
    rows = []
    for name in [*in_order(season), *_paced(season)]:
        own = [_times(p.runs[name].values(), target) if name in p.runs else "–" for p, target in timed if target]
        rows.append([name, *own])
    return "\n".join(markdown(["method", *(f"{p.setting.title}: {100 * t:.1f} %" for p, t in timed if t)], rows))


def pace(season: Sequence[Played]) -> str:
    """Return methods of another pace beside the same with K uploads a round: accuracy, and when the run was over."""
    lines: list[str] = []
    for played in season:
        others = [name for name in played.runs if not played.entrants[name].ranked]
        same = {played.entrants[name].spec for name in others}
        names = [n for n in played.runs if played.entrants[n].spec in same or n in OURS] if others else []
        rows = []
        for name in names:
            runs = list(played.runs[name].values())
            over = [run["time"][-1] for run in runs if run["time"]]
            time = _amount(over) if over else "–"
            reached = "" if played.target is None else _times(runs, played.target)
            rows.append([name, mean_and_spread(map(final, runs)), time, reached])
        if rows:
            target = "" if played.target is None else f"time to {100 * played.target:.1f} %"
            header = ["method", "final accuracy", "time of the run", target]
            lines += [f"**{played.setting.title}**", "", *markdown(header, rows), ""]
    return "\n".join(lines).rstrip()


def rare(season: Sequence[Played]) -> str:
    """Return the accuracy on all classes and on the rare one, and the latter minus the baseline's with its interval."""
    played = [each for each in season if each.setting.rare]
    rows = []
    for name in in_order(played) if played else []:
        row = [name]
        for each in played:
            all_classes, own = (each.measured(measure).get(name) for measure in (final, rare_accuracy))
            base = each.measured(rare_accuracy).get(BASELINE)
            gap = None if own is None or base is None or name == BASELINE else paired(own, base)
            row += [mean_and_spread((values or {}).values()) for values in (all_classes, own)]
            row.append("" if gap is None else f"{gap.mean:+z.1f} ± {gap.half:.1f}")
        rows.append(row)
    header = [f"{e.setting.title}: {what}" for e in played for what in ("all", "rare", f"rare minus {BASELINE}'s")]
    return "\n".join(markdown(["method", *header], rows)) if rows else ""


TABLES: Mapping[str, Callable[[Sequence[Played]], str]] = {
    "summary": summary,
    "accuracy": accuracy,
    "rare": rare,
    "times": times,
    "pace": pace,
    "rates": rates,
}


def draw(season: Sequence[Played], path: Path) -> None:
    """Draw how far each method is behind the best: the mean over settings with its interval, a pale dot a setting."""
    complete = nearly_everywhere(season)
    names = [name for name in in_order(season) if name in complete]
    colours = looks(names)
    with drawing(path, 1, 1, (7, 1.1 + 0.26 * len(names)), 150) as (axes,):
        for place, name in enumerate(names):
            gaps = behind(season, name)
            mean, half = mean_behind(gaps)
            colour = colours[name].colour
            each = [statistics.fmean(gap.values()) for gap in gaps]
            if mean > FURTHEST:
                axes.text(FURTHEST, place, f"{mean:.1f} → ", ha="right", va="center", color=colour)
                continue
            axes.plot(each, [place] * len(each), "o", color=colour, alpha=0.25, markersize=4, markeredgewidth=0)
            axes.errorbar(mean, place, xerr=half or 0, fmt="o", color=colour, markersize=6, capsize=3, linewidth=2)
        axes.set_yticks(range(len(names)), names)
        for label in axes.get_yticklabels():
            label.set_fontweight("bold" if label.get_text() in OURS else "normal")
            label.set_parse_math(False)  # a method of the user's may be called anything
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlim(-0.5, FURTHEST if axes.get_xlim()[1] > FURTHEST else None)
        count = "1 setting" if len(season) == 1 else f"{len(season)} settings"
        axes.set_xlabel(f"points behind the best method\nmean over {count} with its 95 % interval over seeds")
        axes.grid(axis="x", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
