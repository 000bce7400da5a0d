"""Options that were chosen on held-back data: as arms, a table, heat maps, and a file that `fedhist compare` runs."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from fedhist.clients.local import Local
from fedhist.data.held_back import held_back as hold_back
from fedhist.data.task import Task
from fedhist.errors import DivergedError, InvalidInput, as_path, brief, choice, number, require, whole
from fedhist.options import options_of, unknown_option
from fedhist.simulation.arms import Arm, as_arm
from fedhist.simulation.candidates import Contest, Tried, has_option, value_text
from fedhist.simulation.engine import divided, list_options, tasks_by_seed
from fedhist.simulation.hooks import watching
from fedhist.simulation.methods import Method
from fedhist.simulation.sampling import BATCHES, Sampler
from fedhist.simulation.search import FRACTIONS, is_range, points
from fedhist.simulation.trial import Trial
from fedhist.simulation.tuning import Search
from fedhist.store.files import as_toml, slug, whole_file
from fedhist.store.history import ACCURACY
from fedhist.store.measure import UNKNOWN, Measure
from fedhist.store.table import markdown
from fedhist.strategies import Strategy

TUNED = "tuned.toml"
"""The file that `fedhist compare` runs."""
SEARCHES = ("halving", "grid", "optuna")
RATE_FACTORS, SERVER_RATES = (1 / 9, 1 / 3, 1, 3, 9), (0.1, 1.0, 10.0)
"""The usual grid: factors of the rate that a run would have, and the server's rates."""
NOT_TUNED = ("rounds", "until", "eval_every", "client_eval_every", "target", "local")
"""Options that say how long and how a run is judged, not how it learns."""
NOT_PASSED = ("seed", "record", "record_dtype")
"""Options of a trial that candidates do not have."""
ARROWS = {1: "↑", -1: "↓"}


@dataclass(frozen=True)
class Found:
    """What was found for one arm."""

    arm: Arm
    """With the best options."""
    best: dict[str, Any]
    """These options."""
    tried: list[Tried]
    """All candidates, the best first."""
    edges: dict[str, int]
    """The options that might be better beyond what was tried, with 1 for the upper end and -1 for the lower."""
    widened: dict[str, list[Any]]
    """The values beyond the ends of the grid that were tried."""
    updates: int
    """Client updates of all candidates."""
    whole_grid: int
    """Those that all candidates of the grid would have taken in whole runs."""
    guess: float | None = None
    """The accuracy that guessing may reach; None for another primary metric."""


@dataclass(frozen=True)
class Tuned:
    """The options that :func:`tune` has chosen."""

    found: list[Found]
    measure: Measure
    setting: dict[str, Any]
    """What all arms have in common, as commands and files call it."""

    def __repr__(self) -> str:
        options = {name: (f"{key}={value_text(own[key])}" for key in own) for name, own in self.best.items()}
        best = [f"  {name}: {', '.join(each)}" for name, each in options.items()]
        return "\n".join([f"<Tuned by {self.measure.short} of held-back data; table() has what was tried>", *best])

    @property
    def best(self) -> dict[str, dict[str, Any]]:
        """The best options of each arm, by its name."""
        return {each.arm.name: each.best for each in self.found}

    @property
    def arms(self) -> list[Arm]:
        """The arms with their best options, for :func:`compare`."""
        return [each.arm for each in self.found]

    def lines(self) -> tuple[list[str], list[list[str]]]:
        """Return the names of the columns and a line of texts for each arm."""
        names = list(dict.fromkeys(name for each in self.found for name in each.best))
        columns = ["arm", *names, f"held-back {self.measure.short}", "after rounds", "client updates", "of whole grid"]
        lines = []
        for each in self.found:
            arrows = {name: f" {ARROWS[side]}" for name, side in each.edges.items()}
            texts = {name: f"{value_text(value)}{arrows.get(name, '')}" for name, value in each.best.items()}
            own = [texts.get(name, UNKNOWN) for name in names]
            first = each.tried[0]
            share = f"{each.updates / each.whole_grid:.0%}"
            value = self.measure.text(first.value)
            lines.append([each.arm.name, *own, value, f"{first.rounds:,}", f"{each.updates:,}", share])
        return columns, lines

    def table(self) -> str:
        """Return the best options of each arm, and what they cost to find, as a table in Markdown.

        An arrow marks an option that might be better still beyond what was tried.
        """
        return markdown(*self.lines())

    def notes(self) -> list[str]:
        """Return sentences on where nothing was learned, the grid was widened, or it still ends too early."""
        said = []
        for each in self.found:
            value = each.tried[0].value
            if each.guess is not None and value is not None and value <= each.guess:
                own = f"{self.measure.text(value)}{self.measure.unit}"
                said.append(
                    f"{each.arm.name}: its best candidate has {own}, which is no more than guessing; give more rounds."
                )
            for name, values in each.widened.items():
                listed = ", ".join(map(value_text, values))
                said.append(f"{each.arm.name}: {name} was also tried at {listed}, beyond what was given.")
            for name, side in each.edges.items():
                end = "upper" if side > 0 else "lower"
                said.append(
                    f"{each.arm.name}: {name} = {value_text(each.best[name])} lies at the {end} end of what was tried."
                )
        return said

    def toml(self, setting: Mapping[str, Any] | None = None) -> str:
        """Return the settings of a comparison of these arms: ``fedhist compare --config`` runs it on the test set."""
        parts = [_toml(self.setting if setting is None else setting)]
        for each in self.found:
            arm = each.arm
            if arm.spec is None:
                raise InvalidInput(f"{arm.name} was given as an object; name it by a string to have it in a file.")
            parts.append(f"\n[[arm]]\n{_toml({'strategy': arm.spec, 'name': arm.name, **_flat(arm.options)})}")
        return "".join(parts)

    def save(self, folder: str | Path, setting: Mapping[str, Any] | None = None) -> Path:
        """Write into a folder: `tuned.toml`, all candidates as `tuned.json`, the table, and a heat map of each arm.

        Parameters
        ----------
        setting
            What all arms have in common, as files call it, instead of what :func:`tune` was given.
        """
        from fedhist.report.heat import draw_heat  # noqa: PLC0415 (matplotlib takes a second to import)

        folder = as_path("folder", folder)
        folder.mkdir(parents=True, exist_ok=True)
        own = "best", "edges", "widened", "updates", "whole_grid"
        kept = {
            each.arm.name: {**{name: getattr(each, name) for name in own}, "tried": [_row(one) for one in each.tried]}
            for each in self.found
        }
        texts = {"tuned.json": json.dumps(kept, indent=2) + "\n", "tuned.md": self.table()}
        for each in self.found:
            draw_heat(each.tried, each.best, self.measure, each.arm.name, folder / f"tuned-{slug(each.arm.name)}.png")
        for name, text in {**texts, TUNED: self.toml(setting)}.items():  # the file that says it is done comes last
            with whole_file(folder / name) as part:
                part.write_text(text, encoding="utf-8")
        return folder


def _row(tried: Tried) -> dict[str, Any]:
    same = {name: getattr(tried, name) for name in ("rounds", "value", "diverged", "updates")}
    return {"options": tried.options, **same, "seeds": [dataclasses.asdict(each) for each in tried.outcomes]}


def _flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as files have them: those of local work one by one, the ones that are not as by default."""
    flat = {name: value for name, value in options.items() if name != "local"}
    if isinstance(local := options.get("local"), Local):
        known = options_of(Local).items()
        own = {name: getattr(local, each.field) for name, each in known if getattr(local, each.field) != each.default}
        flat = own | flat
    return flat


def _toml(values: Mapping[str, Any]) -> str:
    """Return lines of TOML, or raise if there is more than numbers and texts."""
    for name, value in values.items():
        fits = value is None or isinstance(value, (bool, int, float, str, Path))
        require(fits, f"{name}={brief(value)} is an object; give it as a string to have it in a file.")
    return as_toml(values)


def usual_grid(trial: Trial) -> dict[str, list[float]]:
    """Return the grid of arms for which none is given: clients' rates around that of a trial, and server rates."""
    own = trial.local.lr
    require(isinstance(own, (int, float)), "lr names a rate for each client; say what to choose with grid.")
    return {"lr": [float(f"{own * factor:.2g}") for factor in RATE_FACTORS], "server_lr": list(SERVER_RATES)}  # type: ignore[operator]


def _checked(grid: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Return a grid whose ranges are in order, or raise."""
    fits = isinstance(grid, Mapping) and len(grid) > 0
    require(fits, f"grid must give values for each option, as in {{'lr': (0.01, 0.1)}}, got {brief(grid)}.")
    axes: dict[str, list[Any]] = {}
    for name, values in grid.items():
        require(name not in NOT_TUNED, f"{name} cannot be tuned; it says how long and how a run is judged.")
        listed = isinstance(values, (list, tuple)) and len(values) > 0
        require(listed, f"grid must list values of {name}, as in (0.01, 0.1), got {brief(values)}.")
        plain = all(isinstance(value, (bool, int, float, str)) for value in values)
        require(plain, f"values of {name} must be numbers or strings, got {brief(values)}.")
        require(len(set(values)) == len(values), f"grid names a value of {name} twice: {brief(values)}.")
        axes[name] = sorted(values) if is_range(values) else list(values)
    return axes


def tune(
    arms: Sequence[Strategy | str | Method | Arm],
    task: Task | Callable[[int], Task],
    *,
    grid: Mapping[str, Sequence[Any]] | None = None,
    seeds: int | Sequence[int] = 1,
    held_back: float = 0.1,
    search: str = "halving",
    budget: float = 1 / 3,
    widen: int = 4,
    checkpoint: str | Path | None = None,
    **options: Any,
) -> Tuned:
    """Choose options for each arm on held-back training data; the test data are not looked at.

    All candidates of all arms run side by side for a ninth of the rounds, the best third of them on to a third, and of
    those the best to the end, or two of them as far as the budget goes. Runs are continued, not begun anew. Where the
    best candidate lies at an end of its range, the next value beyond is tried, and the other arms get as many further
    candidates, half a step from their best. The same seeds give the same answer. The other options are those of
    :class:`Trial` and of :func:`simulate_many`.

    Parameters
    ----------
    arms
        Strategies, names, or arms: methods with options of their own.
    task
        One task for all seeds, or a function from a seed to its task.
    grid
        Values for each option to choose, such as ``{"lr": (0.01, 0.03, 0.1), "server_lr": (0.1, 1.0)}``; an option of a
        strategy is named as in ``"fedhist:alpha"``. By default the clients' rate, around the task's own, and the
        server's.
    seeds
        How many seeds, counted from 0, or which; scores are means over them.
    held_back
        Share of the training data to test on; 0 for a task whose test data were held back for this. A task that was
        loaded with ``validation=True`` has its own.
    search
        "halving"; "grid", which takes all candidates to the end; or "optuna", which proposes as many candidates as the
        grid has, between its ends, and halves them (``pip install 'fedhist[optuna]'``).
    budget
        The share of the client updates of the whole grid that may be used, from a ninth on.
    widen
        How many times grids may grow beyond their ends, within the budget.
    checkpoint
        A folder to keep what is done; if it holds a search that was stopped, that is resumed, with the same result.
    """
    fits = isinstance(arms, Sequence) and not isinstance(arms, str) and len(arms) > 0
    require(fits, f"arms must be a list of strategies, names or arms, got {brief(arms)}.")
    given = [as_arm(each) for each in arms]
    for name in (names := [arm.name for arm in given]):
        require(names.count(name) == 1, f"arms names {name} twice.")
    choice("search", search, SEARCHES)
    fits = search == "grid" or FRACTIONS[0] <= number("budget", budget) <= 1
    require(fits, f"budget must be a share from 1/9 to 1, got {budget}.")
    about, how = divided("tune", options, without=NOT_PASSED)
    if "fraction" in how:
        raise unknown_option("tune()", "fraction", about)
    about.pop("client_eval_every", None)
    tasks = _held_back(tasks_by_seed(task, seeds), held_back)
    first = next(iter(tasks.values()))
    axes = _checked(usual_grid(given[0].trial(first, **about)) if grid is None else grid)
    for name in axes:
        require(any(has_option(arm, name) for arm in given), f"no arm that is named by a string has {name!r}.")
    higher = next((metric.higher for metric in first.metrics if metric.name == first.primary), False)
    guess = _guess([*tasks.values()])
    contests = [_contest(arm, axes, higher, guess) for arm in given]
    with watching(how.get("on_round")) as how["on_round"], TemporaryDirectory() as apart:
        folder = Path(apart) if checkpoint is None else as_path("checkpoint", checkpoint)
        made = Search(contests, tasks, about, how, folder, 1.0 if search == "grid" else budget)
        samplers = [_sampler(contest, next(iter(tasks))) for contest in contests] if search == "optuna" else []
        made.run((1.0,) if search == "grid" else FRACTIONS, whole("widen", widen, 0), samplers)
    found = [_found(made, contest, axes) for contest in contests]
    facts = {name: value for name, value in first.about.items() if name not in ("validation", "held_back")}
    setting = {"dataset": first.name, "clients": first.num_clients, **facts, **_flat(about), "seed": max(tasks) + 1}
    return Tuned(found, Measure(first.primary, higher), setting)


list_options(tune, (*NOT_PASSED, "fraction"))


def _held_back(tasks: Mapping[int, Task], share: float) -> dict[int, Task]:
    """Return the tasks with held-back test data; one task for all seeds stays one."""
    if share == 0:
        return dict(tasks)
    made = {id(task): hold_back(task, share) for task in tasks.values()}
    return {seed: made[id(task)] for seed, task in tasks.items()}


def _guess(tasks: Sequence[Task]) -> float | None:
    """Return an accuracy that guessing the most frequent label reaches by chance; None for other tasks than of labels.

    That is two standard errors above the label's share.
    """
    if tasks[0].primary != ACCURACY or tasks[0].num_classes == 0:
        return None
    shares = [(float(task.y_test.bincount().max()) / len(task.y_test), len(task.y_test)) for task in tasks]
    return fmean(share + 2 * math.sqrt(share * (1 - share) / count) for share, count in shares)


def _contest(arm: Arm, axes: Mapping[str, list[Any]], higher: bool, guess: float | None) -> Contest:
    """Return the candidates of an arm: all, or those of the options that it has."""
    own = {name: list(values) for name, values in axes.items() if has_option(arm, name)}
    require(len(points(own)) > 1, f"grid holds a single candidate of {arm.name}; give several values.")
    return Contest(arm, own, higher, guess)


def _sampler(contest: Contest, seed: int) -> Sampler:
    return Sampler(contest.axes, len(points(contest.axes)) // BATCHES, seed)


def _found(search: Search, contest: Contest, given: Mapping[str, list[Any]]) -> Found:
    best = contest.ranked()[0]
    if contest.tried[best].diverged:
        raise DivergedError(f"all candidates of {contest.arm.name} diverged; give smaller rates.")
    places = {point: place for place, point in enumerate(contest.ranked())}
    order = sorted(
        contest.tried,
        key=lambda p: (places.get(p, len(places)), -contest.tried[p].rounds, contest.rank(p)),
    )
    return Found(
        arm=contest.candidate(best),
        best=contest.options(best),
        tried=[contest.tried[point] for point in order],
        edges=search.edges(contest),
        widened={
            name: new for name, values in contest.axes.items() if (new := [v for v in values if v not in given[name]])
        },
        updates=sum(each.updates for each in contest.tried.values()),
        whole_grid=search.updates_of_grid(contest, given),
        guess=contest.guess,
    )
