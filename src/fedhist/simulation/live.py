"""Rounds whose arrivals are taken one by one, since some may be sent back.

Who arrives when then depends on which uploads are let in, so there is no schedule beforehand. While all of them
are, this is the slow twin of rounds that follow one, and gives the same result to the bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedhist.clients import Candidate, Evaluation, Job, Trainer
from fedhist.errors import BadUpload
from fedhist.simulation.run import Run
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.screening import Refused, Screen
from fedhist.world.clock import LiveClock, Start
from fedhist.world.faults import Received, broken, check_form

IN_A_ROW = 100
"""Uploads in a row that are rejected before a run is given up."""


class LiveRounds:
    """Takes runs through their rounds, arrival by arrival."""

    def __init__(self, runs: Sequence[Run], trainer: Trainer) -> None:
        self.runs, self.trainer = runs, trainer
        self._live = [_Live(run, trainer) for run in runs]

    def step(self, round_: int) -> None:
        """Take all runs through one round."""
        with torch.no_grad():
            for live in self._live:
                if live.run.lost is None:
                    live.round(round_)

    def evaluate(self) -> list[Evaluation]:
        """Evaluate all runs' models."""
        return self.trainer.evaluate([Candidate(run.task, run.seed, run.model) for run in self.runs])

    def state(self, round_: int) -> list[dict[str, Tensor]]:
        """Return what the runs need after a round: who is at work on what, and what came before."""
        return [live.state(round_) for live in self._live]

    def restore(self, round_: int, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Put back what :meth:`state` returned after a round."""
        for live, state in zip(self._live, states, strict=True):
            live.restore(round_, state)

    def close(self) -> None:
        """Release the trainer."""
        self.trainer.close()


class _Live:
    """One run, its clock, and the versions its clients hold."""

    def __init__(self, run: Run, trainer: Trainer) -> None:
        self.run, self.trainer, trial = run, trainer, run.trial
        self.clock = LiveClock(trial.task.num_clients, trial.k, trial.devices, trial.seed, trial.concurrency)
        self.screen = Screen(trial.bad_updates, trial.max_norm_ratio)
        self.versions = {1: run.model.clone()}
        self.holders = Counter({1: len(self.clock.waiting)})
        self.previous: dict[int, Tensor] = {}
        self.computed: dict[int, Tensor] = {}
        """By the number of the start: uploads that are ready and have not arrived."""

    def round(self, round_: int) -> None:
        """Take in arrivals until K are good, then let the server close the round."""
        run, good, in_a_row = self.run, list[tuple[Start, Tensor, float]](), 0
        self.screen.norms.model = _length(run.model)
        while len(good) < run.schedule.k or self._colluded(good, round_):
            start = self._next(run.schedule.k - len(good))
            try:
                delta, norm = self._judged(start, round_, [norm for _, _, norm in good])
            except Refused as reason:
                self._sent_back(start, round_, reason)
                in_a_row += 1
                if in_a_row == IN_A_ROW:
                    run.diverged(round_, f"{IN_A_ROW} uploads in a row were rejected in round {round_}, since {reason}")
                    return
            else:
                in_a_row = 0
                good.append((start, delta, norm))
        self._close(round_, good)

    def _colluded(self, good: list[tuple[Start, Tensor, float]], round_: int) -> bool:
        """Send back what attackers who wait for the others of their round overdo; return whether somebody has."""
        run = self.run
        if run.attack is None or not run.attack.colludes:
            return False
        honest = self._arrivals(torch.stack([delta for _, delta, _ in good]), [start for start, _, _ in good], round_)
        sent = run.as_sent(honest, torch.tensor(round_ - 1)).deltas
        others, bad = [norm for _, _, norm in good], list[tuple[Start, Refused]]()
        for i, (start, delta, _) in enumerate(good):
            try:
                check_form(Received(sent[i], start.client, start.version), Received(delta, start.client, start.version),
                           run.task.num_clients, round_)  # fmt: skip
                self.screen.scale(_length(sent[i]), others)
            except Refused as refusal:
                bad.append((start, refusal))
        for start, why in bad:
            self._sent_back(start, round_, why)
        good[:] = [each for each in good if all(each[0] is not start for start, _ in bad)]
        return bool(bad)

    def _next(self, wanted: int) -> Start:
        """Return the next arrival; it and those that may follow are computed together."""
        if self.clock.waiting[0].number not in self.computed:
            ahead = [start for start in self.clock.upcoming(wanted) if start.number not in self.computed]
            rows = [torch.empty_like(self.run.model) for _ in ahead]
            for future in self.trainer.start([self._job(start) for start in ahead], rows):
                future.result()
            self.computed |= {start.number: row for start, row in zip(ahead, rows, strict=True)}
        return self.clock.pop()

    def _job(self, start: Start) -> Job:
        run, received = self.run, self.versions[start.version]
        last = self.previous.get(start.client)
        return Job(run.task, run.local, run.method.objective, run.seed, start.client, start.version, received, last)

    def _judged(self, start: Start, round_: int, others: Sequence[float]) -> tuple[Tensor, float]:
        """Return an upload that may be let in, and its length; raise if it may not."""
        trial = self.run.trial
        sent = self.computed[start.number]
        if self.run.attack is not None and not self.run.attack.colludes:
            sent = self.run.as_sent(self._arrivals(sent[None], [start], round_), torch.tensor(round_ - 1)).deltas[0]
        honest = Received(sent, start.client, start.version)
        kind = None if trial.faults is None else trial.faults.kind(trial.seed, start.client, start.number)
        if kind == "lost":
            raise _Lost("it was lost")
        upload = honest if kind is None else broken(kind, honest, trial.task.num_clients, round_)
        check_form(upload, honest, trial.task.num_clients, round_)
        norm = _length(upload.delta)
        scale = self.screen.scale(norm, others)
        if scale < 1:
            self._note(start, round_, "clipped", f"its length was {norm:.3g}")
        return (upload.delta if scale == 1 else upload.delta * scale), norm * scale

    def _sent_back(self, start: Start, round_: int, reason: Refused) -> None:
        """Let a client whose upload was not let in begin again with the current model."""
        lost = isinstance(reason, _Lost)
        if not lost and self.screen.policy == "stop":
            raise BadUpload(f"{self.run.trial}: client {start.client}'s upload in round {round_} is bad: {reason}.")
        self._note(start, round_, "lost" if lost else "rejected", str(reason))
        self._hold(round_)
        self._settle(start)
        self.clock.again(start, round_)

    def _settle(self, start: Start) -> None:
        """Forget an upload that has arrived; the client itself remembers what it trained."""
        upload = self.computed.pop(start.number)
        if self.run.method.objective.uses_previous:
            self.previous[start.client] = self.versions[start.version] - upload
        self._release(start.version)

    def _note(self, start: Start, round_: int, event: str, reason: str) -> None:
        self.run.note(round_, start.time, event, client=start.client, reason=reason)

    def _hold(self, version: int) -> None:
        if version not in self.versions:
            self.versions[version] = self.run.model.clone()
        self.holders[version] += 1

    def _release(self, version: int) -> None:
        self.holders[version] -= 1
        if self.holders[version] == 0:
            del self.holders[version], self.versions[version]

    def _close(self, round_: int, good: Sequence[tuple[Start, Tensor, float]]) -> None:
        run, row, starts = self.run, round_ - 1, [start for start, _, _ in good]
        schedule = run.schedule
        schedule.clients[row] = [start.client for start in starts]
        schedule.staleness[row] = [round_ - start.version + 1 for start in starts]
        schedule.arrived[row] = [start.time for start in starts]
        arrivals = self._arrivals(torch.stack([delta for _, delta, _ in good]), starts, round_)
        if run.attack is not None and run.attack.colludes:
            arrivals = run.as_sent(arrivals, torch.tensor(row))
        run.aggregate(arrivals)
        if run.strategy.last_weights is not None:
            run.history.weights[row] = run.strategy.last_weights.cpu().numpy()
        if not bool(torch.isfinite(run.model.sum())):
            run.diverged(round_, f"the model became NaN or infinite in round {round_}")
        self.screen.norms.recent.extend(norm for _, _, norm in good)
        for start in starts:
            self._hold(round_ + 1)
            self._settle(start)
        self.clock.close(starts, round_)

    def _arrivals(self, deltas: Tensor, starts: Sequence[Start], round_: int) -> Arrivals:
        clients = np.array([start.client for start in starts])
        versions = np.array([start.version for start in starts])
        facts = round_ - versions + 1, clients, self.run.task.sizes[clients]
        staleness, ids, sizes = (torch.from_numpy(fact).to(deltas.device) for fact in facts)
        return Arrivals(deltas, staleness, ids, sizes, validate=False)

    def state(self, round_: int) -> dict[str, Tensor]:
        """Return what the rounds after `round_` need."""
        schedule, held = self.run.schedule, sorted(self.versions)
        state = {f"clock.{name}": torch.from_numpy(array) for name, array in self.clock.state().items()}
        state |= {
            "clients": torch.from_numpy(schedule.clients[:round_]),
            "staleness": torch.from_numpy(schedule.staleness[:round_]),
            "arrived": torch.from_numpy(schedule.arrived[:round_]),
            "norms": torch.tensor(list(self.screen.norms.recent), dtype=torch.float64),
            "held": torch.tensor(held),
            "versions": torch.stack([self.versions[version] for version in held]),
        }
        if self.previous:
            state |= {"previous.clients": torch.tensor(list(self.previous))}
            state |= {"previous": torch.stack(list(self.previous.values()))}
        return state

    def restore(self, round_: int, state: Mapping[str, Tensor]) -> None:
        """Put back what :meth:`state` returned after `round_`."""
        run, device = self.run, self.run.device
        clock = {name.removeprefix("clock."): t.numpy() for name, t in state.items() if name.startswith("clock.")}
        self.clock.restore(clock)
        for name in ("clients", "staleness", "arrived"):
            getattr(run.schedule, name)[:round_] = state[name].numpy()
        self.screen.norms.recent.extend(state["norms"].tolist())
        self.versions = dict(zip(state["held"].tolist(), state["versions"].to(device), strict=True))
        self.holders = Counter(start.version for start in self.clock.waiting)
        if "previous" in state:
            clients, models = state["previous.clients"].tolist(), state["previous"].to(device)
            self.previous = dict(zip(clients, models, strict=True))


class _Lost(Refused):
    """An upload that never arrived."""


def _length(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64))
