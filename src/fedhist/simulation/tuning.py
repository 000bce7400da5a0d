"""Chooses options for each arm of a comparison on held-back data, by successive halving.

All candidates of all arms are run side by side for a ninth of the rounds. The best third of each arm's go on to a third
of the rounds, and of those the best to the end, or two of them as far as the budget goes. Runs are continued, not begun
anew, so that rates which follow the round are those of a whole run. What is finished is kept in a folder step by step.
"""

import hashlib
import json
import shutil
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedhist import __version__
from fedhist.data.task import Task
from fedhist.errors import DivergedError, FedHistError, InvalidInput, reason, require
from fedhist.simulation.candidates import Contest, Outcome, Tried, judged
from fedhist.simulation.engine import simulate_many, stop_of
from fedhist.simulation.functions import version_of
from fedhist.simulation.regroup import carry_over
from fedhist.simulation.sampling import BATCHES, Sampler
from fedhist.simulation.search import Point, beyond, further, nearer, points, survivors
from fedhist.simulation.trial import Trial
from fedhist.store.files import parse_json, read_text, whole_file

Job = tuple[Contest, Point]


class Search:
    """Takes the candidates of some arms from one comparison to the next.

    Parameters
    ----------
    contests
        The arms, with the values to try.
    tasks
        By seed, tasks that are tested on held-back data.
    shared
        Options of all trials.
    how
        Options of :func:`simulate_many`.
    folder
        Where finished steps and the states of runs are kept.
    budget
        The share of the client updates of whole grids that may be used.
    """

    def __init__(
        self,
        contests: Sequence[Contest],
        tasks: Mapping[int, Task],
        shared: Mapping[str, Any],
        how: Mapping[str, Any],
        folder: Path,
        budget: float,
    ) -> None:
        self.contests, self.tasks, self.shared, self.how, self.folder = contests, tasks, shared, how, folder
        self._steps = 0
        self._made: dict[Job, list[Trial]] = {}
        for contest in contests:
            whole = sum(self._cost(contest, point, 0.0, 1.0) for point in points(contest.axes))
            contest.budget = int(budget * whole + 1e-9)

    def run(self, fractions: Sequence[float], widen: int, samplers: Sequence[Sampler] = ()) -> None:
        """Compare candidates after each of some fractions of the rounds.

        `widen` is how many times the grids may grow where the best candidate lies at an end. With `samplers`, one for
        each arm, these propose the first candidates in place of the grid.
        """
        for contest in self.contests:
            fewest = min(trial.rounds for trial in self._trials(contest, points(contest.axes)[0]))
            fits = fewest * fractions[0] > 1 - 1e-9
            require(
                fits, f"{contest.arm.name} has {fewest} rounds, too few to compare candidates on the way; give more."
            )
        if samplers:
            self._sample(fractions[0], samplers)
        else:
            self._begin(fractions[0], {each: points(each.axes) for each in self.contests})
        going = list(self.contests)
        for place, fraction in enumerate(fractions):
            following = fractions[place + 1] if place + 1 < len(fractions) else None
            while widen and not samplers and self._widen(going, fraction, following if place == 0 else None):
                widen -= 1
            if following is None:
                return
            kept = {each: self._kept(each, fraction, following) for each in going}
            if not any(kept.values()):
                following = min(self._reach_of_two(each, fraction) for each in going)
                kept = {each: self._kept(each, fraction, following) for each in going}
            for contest in (each for each in going if not kept[each]):  # its budget ends on the way
                self._take_two(contest, fraction)
            going = [each for each in going if kept[each]]
            if not going:
                return
            for contest in going:
                contest.alive = contest.ranked()[: kept[contest]]
            self._take([(each, point) for each in going for point in each.alive], fraction, following)
            if following < fractions[place + 1]:
                return

    def _kept(self, contest: Contest, fraction: float, following: float) -> int:
        """Return how many candidates of an arm go on to a fraction of the rounds."""
        live = [point for point in contest.ranked() if not contest.tried[point].diverged]
        costs = [self._cost(contest, point, fraction, following) for point in live]
        return survivors(len(contest.alive), costs, contest.left) if following > fraction else 0

    def _reach_of_two(self, contest: Contest, fraction: float) -> float:
        """Return the fraction to which the budget suffices for the two best candidates of an arm."""
        two = contest.ranked()[:2]
        rounds = self._trials(contest, two[0])[0].rounds

        def cost(stop: int) -> int:
            return sum(self._cost(contest, point, fraction, stop / rounds) for point in two)

        return max(fraction, (bisect_right(range(rounds + 1), contest.left, key=cost) - 1) / rounds)

    def _take_two(self, contest: Contest, fraction: float) -> None:
        """Take the two best candidates of an arm as far as its budget goes."""
        reach = self._reach_of_two(contest, fraction)
        if self._kept(contest, fraction, reach):
            contest.alive = contest.ranked()[:2]
            self._take([(contest, point) for point in contest.alive], fraction, reach)

    def _begin(self, fraction: float, proposed: Mapping[Contest, Sequence[Point]]) -> None:
        """Run new candidates up to a fraction of the rounds."""
        for contest, new in proposed.items():
            contest.alive += new
        self._take([(contest, point) for contest, new in proposed.items() for point in new], 0.0, fraction)

    def _sample(self, fraction: float, samplers: Sequence[Sampler]) -> None:
        """Run as many candidates as the grids have, proposed in batches."""
        counts = [len(points(each.axes)) for each in self.contests]
        for batch in range(BATCHES):
            wanted = [(batch + 1) * count // BATCHES - batch * count // BATCHES for count in counts]
            asked = [sampler.ask(count) for sampler, count in zip(samplers, wanted, strict=True)]
            pairs = list(zip(self.contests, asked, strict=True))
            self._begin(fraction, {each: [p for p in dict.fromkeys(new) if p not in each.tried] for each, new in pairs})
            for sampler, (contest, new) in zip(samplers, pairs, strict=True):
                sampler.tell([contest.tried[point].value for point in new], contest.higher)

    def _widen(self, going: Sequence[Contest], fraction: float, reserve: float | None) -> bool:
        """Try candidates beyond the ends that the best ones lie at; return whether there were any.

        Every arm gets as many new candidates: one whose best lies inside its grid tries half steps around it. With
        `reserve`, enough of the budget is left to take two candidates to that fraction.
        """
        bests = {each: each.ranked()[0] for each in going}
        opened = {each: each.open_ends() for each in going}
        outside = {each: further(each.axes, bests[each], opened[each], self._possible(each)) for each in going}
        count = max(map(len, outside.values()))
        for contest in going:
            cost = self._cost(contest, bests[contest], 0.0, fraction)
            reserved = 0 if reserve is None else 2 * self._cost(contest, bests[contest], fraction, reserve)
            count = min(count, max(0, contest.left - reserved) // cost)
        if count == 0:
            return False
        proposed: dict[Contest, list[Point]] = {}
        for contest, best in bests.items():
            inside = nearer(contest.axes, best, contest.tried, self._possible(contest))
            proposed[contest] = [*outside[contest], *inside][:count]
            for name, side in opened[contest].items():
                value = beyond(contest.axes[name], side)
                if any(contest.options(point)[name] == value for point in proposed[contest]):
                    contest.axes[name] = sorted([*contest.axes[name], value])
        self._begin(fraction, proposed)
        return True

    def _possible(self, contest: Contest) -> Callable[[Point], bool]:
        """Return whether a candidate can be run, as a function of it: a share may not grow beyond 1, nor K beyond N."""

        def possible(point: Point) -> bool:
            try:
                self._trials(contest, point)
            except InvalidInput:
                return False
            return True

        return possible

    def updates_of_grid(self, contest: Contest, given: Mapping[str, Sequence[Any]]) -> int:
        """Return the client updates that whole runs of all candidates of a grid would take.

        Where rounds close with fewer uploads than they might, they are taken from the rounds that there were.
        """
        total = 0.0
        for point in points({name: given[name] for name in contest.axes}):
            tried = contest.tried.get(point)
            for place, trial in enumerate(self._trials(contest, point)):
                own = tried.outcomes[place] if tried and not tried.diverged else None
                total += trial.rounds * (own.updates / own.rounds if own else trial.k)
        return round(total)

    def edges(self, contest: Contest) -> dict[str, int]:
        """Return the options of the best candidate that might be better beyond an end of what was tried."""
        best, possible = contest.ranked()[0], self._possible(contest)
        found = {}
        for name, side in contest.open_ends().items():
            value = beyond(contest.axes[name], side)
            if value is not None and possible(tuple({**contest.options(best), name: value}.values())):
                found[name] = side
        return found

    def _trials(self, contest: Contest, point: Point) -> list[Trial]:
        """Return the runs of a candidate, one for each seed."""
        if (contest, point) not in self._made:
            texts = [f"{name} = {value}" for name, value in contest.options(point).items()]
            arm = contest.candidate(point, ", ".join([contest.arm.name, *texts]))
            made = [arm.trial(task, seed=seed, **self.shared) for seed, task in self.tasks.items()]
            self._made[contest, point] = made
        return self._made[contest, point]

    def _cost(self, contest: Contest, point: Point, since: float, fraction: float) -> int:
        """Return the client updates, at most, of a candidate from one fraction of the rounds to another."""
        return sum(_rounds(trial, since, fraction) * trial.k for trial in self._trials(contest, point))

    def _take(self, jobs: Sequence[Job], since: float, fraction: float) -> None:
        """Take candidates from one fraction of their rounds to another, side by side."""
        if not jobs:
            return
        trials = [trial for contest, point in jobs for trial in self._trials(contest, point)]
        seeds, sources = len(self.tasks), list[tuple[Path, int]]()
        for contest, point in jobs if since else ():
            step, first = contest.homes[point]
            sources += [(self._states(step), first + place) for place in range(seeds)]
        outcomes = self._step(trials, fraction, sources)
        for place, (contest, point) in enumerate(jobs):
            end = max(_rounds(trial, 0.0, fraction) for trial in self._trials(contest, point))
            own = outcomes[place * seeds : (place + 1) * seeds]
            contest.tried[point] = Tried(contest.options(point), end, own)
            contest.homes[point] = self._steps, place * seeds
            contest.spent += self._cost(contest, point, since, fraction)
        needed = {each.homes[point][0] for each in self.contests for point in each.alive}
        for step in {*range(self._steps)} - needed:
            shutil.rmtree(self._states(step), ignore_errors=True)
        self._steps += 1

    def _states(self, step: int) -> Path:
        return self.folder / f"step-{step:02d}"

    def _step(self, trials: Sequence[Trial], fraction: float, sources: Sequence[tuple[Path, int]]) -> list[Outcome]:
        """Run trials up to a fraction of their rounds, or return what an earlier process has found."""
        states = self._states(self._steps)
        file, what = states.with_suffix(".json"), _digest(trials, fraction)
        if file.exists():
            return _read(file, what)
        if sources and not states.exists():
            carry_over(sources, states)
        try:
            histories: Sequence[Any] = simulate_many(trials, checkpoint=states, fraction=fraction, **self.how)
        except DivergedError as error:  # all of them, which is as good an answer as any
            if len(error.histories) != len(trials):
                raise
            histories = error.histories
        outcomes = [judged(history) for history in histories]
        with whole_file(file) as part:
            part.write_text(json.dumps({"step": what, "outcomes": [asdict(each) for each in outcomes]}) + "\n")
        return outcomes


def _rounds(trial: Trial, since: float, fraction: float) -> int:
    """Return the rounds from one fraction of a trial's to another."""
    return stop_of(trial.rounds, fraction) - (stop_of(trial.rounds, since) if since else 0)


def _digest(trials: Sequence[Trial], fraction: float) -> str:
    """Return a checksum of all that decides the outcomes of a step."""
    about = [[trial.method.name, version_of(trial.method), trial.task.name, trial.described()] for trial in trials]
    return hashlib.blake2b(json.dumps([__version__, fraction, about]).encode(), digest_size=16).hexdigest()


def _read(file: Path, what: str) -> list[Outcome]:
    """Return the outcomes of a finished step, which must be this one."""
    try:
        stored = parse_json(read_text(file))
        outcomes = [Outcome(**each) for each in stored["outcomes"]]
        same = stored["step"] == what
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FedHistError(f"{file} cannot be read: {reason(error)}.") from error
    require(same, f"{file.parent} holds another search; use another folder.")
    return outcomes
