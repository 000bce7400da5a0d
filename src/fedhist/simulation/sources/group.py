"""Runs whose clients train as one batch, and the tables that say what each round works on."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedhist.clients.batched import TEST_PIECE, Side, descend, evaluate, from_table, many_models, padded, without_rate
from fedhist.clients.net import ModuleNet
from fedhist.clients.scores import Score
from fedhist.data.examples import TestSet
from fedhist.data.task import Task
from fedhist.simulation.run import Run
from fedhist.simulation.versions import check_held, check_models
from fedhist.streams import Stream

BLOCK = 64
"""Rounds whose minibatches are drawn and sent to the device at a time, at most."""
LARGEST_TABLE = 1 << 24
"""Indices in such a table, at most."""


class Batches:
    """Where the minibatches of one seed's clients come from: the same for all methods."""

    def __init__(self, run: Run) -> None:
        self.task, self.schedule, self.local = run.task, run.arriving.schedule, run.trial.local
        self._stream, self._dropout = (Stream(run.trial.seed, name) for name in ("batches", "dropout"))
        self._plans: tuple[slice, list[list[NDArray[np.int64]]]] = slice(0), []

    def plans(self, rows: slice) -> list[list[NDArray[np.int64]]]:
        """Return the minibatches of all uploads of some rounds; groups that ask for the same get the same."""
        if rows != self._plans[0]:
            tables = (table[rows].ravel().tolist() for table in self.schedule.working)
            draw = (
                self.local.batches(self.task.client(c), self._stream.at(c, v)) for c, v in zip(*tables, strict=True)
            )
            self._plans = rows, list(draw)
        return self._plans[1]

    def keys(self, rows: slice) -> Tensor:
        """Return the keys of the random numbers that are drawn in some rounds, ``(rounds, K)``."""
        clients, versions = (table[rows] for table in self.schedule.working)
        pairs = zip(clients.ravel().tolist(), versions.ravel().tolist(), strict=True)
        return torch.tensor([self._dropout.integer(*pair) for pair in pairs]).view(clients.shape)


class Group:
    """Runs whose clients are trained as one batch: same data, same module, same objective, same local work.

    They may differ in everything else: method, seed, split, N, K and learning rate.
    """

    def __init__(self, runs: Sequence[Run], net: ModuleNet, known: dict[object, Batches]) -> None:
        self.runs, self.net = runs, net
        first = runs[0].server.model
        device = self.device = first.device
        self.local, self.objective = runs[0].trial.local, runs[0].trial.method.objective
        self.ks = [run.arriving.schedule.k for run in runs]
        self.parcel, self._size = runs[0].parcel, first.numel()
        self._rate, self._rates = self._learning_rates(first)

        # All runs' models and versions lie in one tensor each, so that a round moves them with one kernel.
        self.models = torch.stack([run.server.version for run in runs])
        for run, version in zip(runs, self.models, strict=True):
            run.server.place(version)
        self._ones = torch.ones_like(self.models[0])
        slots = [run.arriving.versions.num_slots + 1 for run in runs]  # one more, for versions that nobody is sent
        self._starts = np.cumsum([0, *slots])
        self.versions = first.new_empty((int(self._starts[-1]), self.parcel.version_width))
        store, fetch = [], []
        for run, count, start in zip(runs, slots, self._starts, strict=False):
            plan = run.arriving.versions.slots
            store.append(plan[1:-1] % count + start)
            fetch.append(plan[run.arriving.schedule.working[1]] % count + start)
        self._store = torch.tensor(np.stack(store, axis=1), device=device)
        self._fetch = torch.tensor(np.concatenate(fetch, axis=1), device=device)

        self._holders = np.cumsum([0, *(run.task.num_clients for run in runs)])
        if self.objective.uses_previous:
            nobody = int(self._holders[-1])  # whose model is one more
            who = [run.arriving.schedule.clients for run in runs]
            owners = [np.where(c >= 0, c + at, nobody) for c, at in zip(who, self._holders, strict=False)]
            self._owners = torch.tensor(np.concatenate(owners, axis=1), device=device)
            self._previous = first.new_zeros((nobody + 1, first.numel()))
            self._known = first.new_zeros(nobody + 1)

        self.sources: list[Batches] = []
        columns: list[int] = []
        starts_of: dict[Batches, int] = {}
        for run in runs:
            key = run.task, run.trial.seed, id(run.arriving), without_rate(run.trial.local)
            source = known.setdefault(key, Batches(run))
            if source not in starts_of:
                starts_of[source] = sum(each.schedule.k for each in self.sources)
                self.sources.append(source)
            columns += range(starts_of[source], starts_of[source] + source.schedule.k)
        self._columns = torch.tensor(columns, device=device)
        largest = max(int(run.task.sizes[run.arriving.schedule.working[0]].max()) for run in runs)
        self._shape = self.local.steps_for(largest), min(self.local.batch_size, largest)
        self._width = sum(source.schedule.k for source in self.sources)
        self.block = max(1, min(BLOCK, LARGEST_TABLE // (self._width * self._shape[0] * self._shape[1])))

    def _learning_rates(self, like: Tensor) -> tuple[float, Tensor | None]:
        """Return the learning rate of all uploads, or a table with that of each, ``(rounds, clients)``."""
        rates = []
        for run in self.runs:
            local, schedule = run.trial.local, run.arriving.schedule
            if local.one_rate:
                rates.append(np.full(schedule.clients.shape, local.lr, float))
                continue
            pairs = zip(*(table.ravel().tolist() for table in schedule.working), strict=True)
            own = np.array([local.rate(client, version, run.trial.rounds) for client, version in pairs])
            rates.append(own.reshape(schedule.clients.shape))
        table = np.concatenate(rates, axis=1)
        same = bool((table == table[0, 0]).all())
        return float(table[0, 0]), None if same else torch.tensor(table, dtype=like.dtype, device=like.device)

    def allocate(self, block: int) -> None:
        """Make room for the minibatches of `block` rounds."""
        shape = (block, self._width, *self._shape)
        self._index = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self._weight = self.models.new_zeros(shape)
        self._keys = torch.zeros(shape[:2], dtype=torch.int64, device=self.device)

    def draw(self, rows: slice) -> None:
        """Draw the minibatches of some rounds and put them where the rounds look for them."""
        start = 0
        for source in self.sources:
            k = source.schedule.k
            index, weight = padded(source.plans(rows), *self._shape)
            count = len(index) // k
            for table, values in ((self._index, index), (self._weight, weight)):
                table[:count, start : start + k].copy_(values.view(count, k, *self._shape))
            if self.runs[0].task.is_random:
                self._keys[:count, start : start + k].copy_(source.keys(rows))
            start += k

    def uploads(self, done: Tensor, place: Tensor) -> list[tuple[Tensor, ...]]:
        """Store the versions that open this round; return each run's uploads, ``(K, row width)``, and their lengths.

        Between these are the models that the uploads started from, and the last is the sum of the run's model.
        """
        self.versions.index_copy_(0, self._store.index_select(0, done)[0], self.models)
        received = self.versions.index_select(0, self._fetch.index_select(0, done)[0])
        index, weight, keys = (
            table.index_select(0, place)[0].index_select(0, self._columns)
            for table in (self._index, self._weight, self._keys)
        )
        previous, known = received[:, : self._size], received.new_zeros(len(received))
        if self.objective.uses_previous:
            owners = self._owners.index_select(0, done)[0]
            known = self._known.index_select(0, owners)
            previous = torch.where(known[:, None] > 0, self._previous.index_select(0, owners), previous)
        task, lr = self.runs[0].task, self._rate
        side = Side(
            self.net,
            self.local,
            self.objective,
            task.loss,
            lr if self._rates is None else self._rates.index_select(0, done)[0][:, None],
            received,
            previous,
            known,
            keys if task.is_random else None,
            weight,
        )
        with many_models(self.device):
            rows = descend(side, from_table(task.on(self.device), index))
        if self.objective.uses_previous:
            self._previous.index_copy_(0, owners, rows[:, self.parcel.kept])
            self._known.index_fill_(0, owners, 1)
        norms = torch.linalg.vector_norm(rows[:, : self._size], dim=1)
        if not self.parcel.plain:
            norms = norms + self.parcel.flaw(rows)
        sums = torch.mv(self.models, self._ones)  # not lengths, whose squares overflow long before
        tables = (torch.split(each, self.ks) for each in (rows, received[:, : self._size], norms))
        return list(zip(*tables, torch.split(sums, 1), strict=True))

    def states(self, done: int) -> list[dict[str, Tensor]]:
        """Return what each run needs after `done` rounds, besides its server."""
        states = []
        for place in range(len(self.runs)):
            held, rows, own = self._held(place, done)
            state = {"held": torch.from_numpy(held), "versions": self.versions[rows]}
            if self.objective.uses_previous:
                known = self._known[own].nonzero()[:, 0]
                state |= {"previous.clients": known, "previous": self._previous[own][known]}
            states.append(state)
        return states

    def restore(self, done: int, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Put back what :meth:`states` returned."""
        for place, state in enumerate(states):
            held, rows, own = self._held(place, done)
            model, version = self.runs[place].server.model, self.models[place]
            check_held(state["held"], held.tolist())
            check_models(state["held"], state["versions"], version, held.tolist())
            self.versions[rows] = state["versions"].to(self.device)
            if self.objective.uses_previous:
                check_models(state["previous.clients"], state["previous"], model, range(own.stop - own.start))
                known = state["previous.clients"].to(self.device)
                self._known[own][known] = 1
                self._previous[own][known] = state["previous"].to(self.device)

    def _held(self, place: int, done: int) -> tuple[NDArray[np.int64], Tensor, slice]:
        """Return the versions that a run's clients hold, where they lie, and where its clients' last models do."""
        plan = self.runs[place].arriving.versions
        held = plan.held_after(done)
        rows = torch.from_numpy(plan.slots[held] + self._starts[place]).to(self.device)
        return held, rows, slice(int(self._holders[place]), int(self._holders[place + 1]))

    def evaluate(self, choose: Callable[[Task], TestSet | None]) -> list[Score | None]:
        """Evaluate all models, on twice as many images at a time as a round trains on, whose memory is planned for.

        Nothing is kept for a gradient, which is about half of what training takes.
        """
        piece = max(1, min(TEST_PIECE, 2 * len(self._columns) * self._shape[1] // len(self.runs)))
        scores: list[Score | None] = [None] * len(self.runs)
        chosen = {i: test for i, run in enumerate(self.runs) if (test := choose(run.task)) is not None}
        models = self.models[:, : self.net.layout.width]
        if any(run.server.averaged is not None for run in self.runs):
            models = torch.stack([run.server.shown for run in self.runs])
        for test in {each.identity: each for each in chosen.values()}.values():
            own = [i for i, each in chosen.items() if each.identity == test.identity]
            with many_models(self.device):
                found = evaluate(self.runs[own[0]].task, self.net, models[own], test, piece)
            for i, score in zip(own, found, strict=True):
                scores[i] = score
        return scores
