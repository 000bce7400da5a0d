"""Rounds of all runs as one computation over static shapes, replayed as a CUDA graph.

The schedule is known, so a round is the same sequence of kernels every time: only tables, which live on
the device, and a counter decide what it works on.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedhist.clients import Evaluation
from fedhist.clients.batched import TEST_PIECE, descend, evaluate, fast_kernels, padded
from fedhist.clients.net import ModuleNet
from fedhist.simulation.run import Run
from fedhist.simulation.trial import sameness
from fedhist.strategies.arrivals import Arrivals
from fedhist.streams import Stream

T = TypeVar("T")

BLOCK = 64
"""Rounds whose batches are drawn and sent to the device at a time, at most."""
TABLE = 1 << 24
"""Indices in such a table, at most."""
WARM_UP = 1
"""Rounds before capture: libraries compile kernels and allocate their workspaces in the first one."""
STREAMS = 8
"""Pieces of a round that a captured graph may run at the same time."""


class _Source:
    """Where the batches of one seed's clients come from: the same for all methods."""

    def __init__(self, run: Run) -> None:
        self.task, self.schedule, self.local = run.task, run.schedule, run.local
        self._stream = Stream(run.seed, "batches")
        self._plans: tuple[slice, list[list[NDArray[np.int64]]]] = slice(0), []

    def plans(self, rows: slice) -> list[list[NDArray[np.int64]]]:
        """Return the batches of all uploads of some rounds; groups that ask for the same get the same."""
        if rows != self._plans[0]:
            clients, versions = (
                table[rows].ravel().tolist() for table in (self.schedule.clients, self.schedule.versions)
            )
            draw = (
                self.local.batches(self.task.client(c), self._stream.at(c, v))
                for c, v in zip(clients, versions, strict=True)
            )
            self._plans = rows, list(draw)
        return self._plans[1]


class _Group:
    """Runs whose clients are trained as one batch: same data, same module, same objective, same local work.

    They may differ in everything else: method, seed, split, N, K and learning rate.
    """

    def __init__(self, runs: Sequence[Run], net: ModuleNet, known: dict[object, _Source], device: torch.device) -> None:
        self.runs, self.net, self.device = runs, net, device
        first = runs[0]
        self.local, self.objective = first.local, first.method.objective
        self.ks = [run.schedule.k for run in runs]
        rates = torch.tensor([run.local.lr for run in runs], dtype=first.model.dtype, device=device)
        same = len({run.local.lr for run in runs}) == 1
        self.lr = first.local.lr if same else rates.repeat_interleave(torch.tensor(self.ks, device=device))[:, None]

        # All runs' models and versions lie in one tensor each, so that a round moves them with one kernel.
        self.models = torch.stack([run.model for run in runs])
        for run, model in zip(runs, self.models, strict=True):
            run.model = model
        slots = [run.plan.num_slots + 1 for run in runs]  # one more, for versions that nobody will upload from
        starts = np.cumsum([0, *slots])
        self.versions = first.model.new_empty((int(starts[-1]), first.model.numel()))
        store, fetch = [], []
        for run, count, start in zip(runs, slots, starts, strict=False):
            store.append(run.plan.slots[1:-1] % count + start)
            fetch.append(run.plan.slots[run.schedule.versions] + start)
        self._store = torch.tensor(np.stack(store, axis=1), device=device)
        self._fetch = torch.tensor(np.concatenate(fetch, axis=1), device=device)

        if self.objective.uses_previous:
            starts = np.cumsum([0, *(run.task.num_clients for run in runs)])
            owners = [run.schedule.clients + start for run, start in zip(runs, starts, strict=False)]
            self._owners = torch.tensor(np.concatenate(owners, axis=1), device=device)
            self._previous = first.model.new_zeros((int(starts[-1]), first.model.numel()))
            self._known = first.model.new_zeros(int(starts[-1]))

        self.sources: list[_Source] = []
        columns: list[int] = []
        starts_of: dict[_Source, int] = {}
        for run in runs:
            key = run.task, run.seed, id(run.schedule), replace(run.local, lr=1.0)
            source = known.setdefault(key, _Source(run))
            if source not in starts_of:
                starts_of[source] = sum(each.schedule.k for each in self.sources)
                self.sources.append(source)
            columns += range(starts_of[source], starts_of[source] + run.schedule.k)
        self._columns = torch.tensor(columns, device=device)
        largest = max(int(run.sizes.max()) for run in runs)
        self._shape = self.local.steps_for(largest), min(self.local.batch_size, largest)
        self._width = sum(source.schedule.k for source in self.sources)
        self.block = max(1, min(BLOCK, TABLE // (self._width * self._shape[0] * self._shape[1])))

    def allocate(self, block: int) -> None:
        """Make room for the batches of so many rounds."""
        shape = (block, self._width, *self._shape)
        self._index = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self._weight = self.models.new_zeros(shape)

    def draw(self, rows: slice) -> None:
        """Draw the batches of some rounds and put them where the rounds look for them."""
        start = 0
        for source in self.sources:
            k = source.schedule.k
            index, weight = padded(source.plans(rows), *self._shape)
            count = len(index) // k
            for table, values in ((self._index, index), (self._weight, weight)):
                table[:count, start : start + k].copy_(values.view(count, k, *self._shape))
            start += k

    def uploads(self, done: Tensor, place: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Store the versions that open this round; return each run's uploads, ``(K, P)``, and how long they are.

        The last of the three is how long the run's model is, ``(1,)``.
        """
        self.versions.index_copy_(0, self._store.index_select(0, done)[0], self.models)
        received = self.versions.index_select(0, self._fetch.index_select(0, done)[0])
        index, weight = (
            table.index_select(0, place)[0].index_select(0, self._columns) for table in (self._index, self._weight)
        )
        previous, known = received, received.new_zeros(len(received))
        if self.objective.uses_previous:
            owners = self._owners.index_select(0, done)[0]
            known = self._known.index_select(0, owners)
            previous = torch.where(known[:, None] > 0, self._previous.index_select(0, owners), received)
        x, y, _, _ = self.runs[0].task.on(self.device)
        with fast_kernels(self.device):
            uploads = descend(
                self.net, self.local, self.objective, self.lr, received, previous, known, (index, weight), (x, y)
            )
        if self.objective.uses_previous:
            self._previous.index_copy_(0, owners, received - uploads)
            self._known.index_fill_(0, owners, 1)
        norms, lengths = (torch.linalg.vector_norm(vectors, dim=1) for vectors in (uploads, self.models))
        return list(
            zip(torch.split(uploads, self.ks), torch.split(norms, self.ks), torch.split(lengths, 1), strict=True)
        )

    def _rows(self, place: int, versions: NDArray[np.int64]) -> Tensor:
        """Return where some versions of a run lie."""
        start = sum(run.plan.num_slots + 1 for run in self.runs[:place])
        return torch.from_numpy(self.runs[place].plan.slots[versions] + start).to(self.device)

    def _holders(self, place: int) -> slice:
        """Return where the models that a run's clients remember lie."""
        start = sum(run.task.num_clients for run in self.runs[:place])
        return slice(start, start + self.runs[place].task.num_clients)

    def state(self, place: int, round_: int) -> dict[str, Tensor]:
        """Return what a run needs after a round, besides its model."""
        state = {"versions": self.versions[self._rows(place, self.runs[place].plan.held_after(round_))]}
        if self.objective.uses_previous:
            known = self._known[self._holders(place)].nonzero()[:, 0]
            state["previous.clients"] = known
            state["previous"] = self._previous[self._holders(place)][known]
        return state

    def restore(self, place: int, round_: int, state: Mapping[str, Tensor]) -> None:
        """Put back what :meth:`state` returned after a round."""
        self.versions[self._rows(place, self.runs[place].plan.held_after(round_))] = state["versions"].to(self.device)
        if self.objective.uses_previous:
            known = state["previous.clients"].to(self.device)
            self._known[self._holders(place)][known] = 1
            self._previous[self._holders(place)][known] = state["previous"].to(self.device)

    def evaluate(self) -> list[Evaluation]:
        # As many images at a time as a round trains on: memory is planned for that.
        piece = max(1, min(TEST_PIECE, len(self._columns) * self._shape[1] // len(self.runs)))
        with fast_kernels(self.device):
            return evaluate(self.runs[0].task, self.net, self.models, piece)


class BatchedRounds:
    """Takes runs through their rounds, all clients of all runs at once."""

    def __init__(self, runs: Sequence[Run], device: torch.device) -> None:
        self.runs, self.device = runs, device
        self._rounds, self._first = runs[0].schedule.rounds, 1
        self._graph: torch.cuda.CUDAGraph | None = None
        self._capture_wanted = device.type == "cuda" and all(run.capturable() for run in runs)
        with self._on_device():
            self._streams = [torch.cuda.Stream() for _ in range(STREAMS)] if self._capture_wanted else []  # type: ignore[no-untyped-call]
        self._done = torch.zeros(1, dtype=torch.int64, device=device)  # rounds closed
        self._place = torch.zeros(1, dtype=torch.int64, device=device)  # of the next round in its block

        nets: dict[tuple[object, ...], ModuleNet] = {}
        members: dict[tuple[tuple[object, ...], object, object], list[int]] = {}
        for i, run in enumerate(runs):
            task, objective = run.task, run.method.objective
            same = *task.data, id(task.model), run.seed if task.seed_matters else 0
            if same not in nets:
                nets[same] = ModuleNet(task.build(run.seed).to(device), task.layout)
            work = replace(run.local, lr=1.0), sameness(objective)
            members.setdefault((same, *work), []).append(i)
        self._members = list(members.values())
        sources: dict[object, _Source] = {}
        self._groups = [_Group([runs[i] for i in each], nets[key[0]], sources, device) for key, each in members.items()]
        self._block = min(group.block for group in self._groups)
        for group in self._groups:
            group.allocate(self._block)

        # What the servers see of a round besides the uploads: one row per round, all runs beside each other.
        facts = [(run.schedule.staleness, run.schedule.clients, run.sizes) for run in runs]
        self._facts = torch.tensor(
            np.stack([np.concatenate(each, axis=1) for each in zip(*facts, strict=True)], axis=1)
        )
        self._facts = self._facts.to(device)
        self._ks = [run.schedule.k for run in runs]
        self._weights = torch.full((self._rounds, sum(self._ks)), torch.nan, device=device)
        self._norms = torch.zeros((self._rounds, sum(self._ks)), device=device)
        self._lengths = torch.zeros((self._rounds, len(runs)), device=device)
        self._recorded = self._looked = 0

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    def step(self, round_: int) -> None:
        """Take all runs through one round."""
        with self._on_device(), torch.no_grad():
            place = (round_ - 1) % self._block
            if place == 0 or round_ == self._first:
                self._place.fill_(place)
                begin = round_ - 1 - place
                for group in self._groups:
                    group.draw(slice(begin, min(begin + self._block, self._rounds)))
            if self._graph is not None:
                self._graph.replay()
                return
            self._round()
            if self._capture_wanted and round_ == self._first + WARM_UP - 1 and self._rounds > round_:
                self._capture()

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            # Its own stream: PyTorch's default one belongs to the device that first captured anything.
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(self.device)):  # type: ignore[no-untyped-call]
                self._round()
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            warnings.warn(f"rounds run one kernel at a time, since CUDA cannot capture them: {reason}", stacklevel=5)
            return
        self._graph = graph

    def _round(self) -> None:
        """One round of all runs, without a look at any value."""
        trained = self._side_by_side([partial(group.uploads, self._done, self._place) for group in self._groups])
        by_run = {
            i: upload
            for members, uploads in zip(self._members, trained, strict=True)
            for i, upload in zip(members, uploads, strict=True)
        }
        deltas, norms, lengths = zip(*(by_run[i] for i in range(len(self.runs))), strict=True)
        facts = torch.split(self._facts.index_select(0, self._done)[0], self._ks, dim=1)
        closed = [partial(self._close, i, deltas[i], norms[i], facts[i]) for i in range(len(self.runs))]
        weights, norms = zip(*self._side_by_side(closed), strict=True)
        for table, parts in ((self._weights, weights), (self._norms, norms), (self._lengths, lengths)):
            table.index_copy_(0, self._done, torch.cat(parts)[None].to(table.dtype))
        self._done += 1
        self._place += 1

    def _side_by_side(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """Do what does not depend on each other; a captured graph may run it at the same time.

        Each piece of work allocates what it needs on the stream it runs on, so that no memory is used
        again by another before it is done.
        """
        if not (self._streams and torch.cuda.is_current_stream_capturing()):
            return [work() for work in works]
        main, results = torch.cuda.current_stream(), []
        for n, work in enumerate(works):
            side = self._streams[n % STREAMS]
            if n < STREAMS:
                side.wait_stream(main)
            with torch.cuda.stream(side):
                results.append(work())
        for side in self._streams[: len(works)]:
            main.wait_stream(side)
        return results

    def _close(self, i: int, deltas: Tensor, norms: Tensor, facts: Tensor) -> tuple[Tensor, Tensor]:
        """Let one run's server aggregate; return the weights it gave, and how long the uploads were that it saw."""
        run = self.runs[i]
        staleness, clients, sizes = facts
        arrivals = run.as_sent(Arrivals(deltas, staleness, clients, sizes, validate=False), self._done)
        if run.attack is not None:
            norms = torch.linalg.vector_norm(arrivals.deltas, dim=1)
        run.aggregate(arrivals)
        weights = run.strategy.last_weights
        return (torch.full_like(norms, torch.nan) if weights is None else weights), norms

    def evaluate(self) -> list[Evaluation]:
        """Evaluate all runs' models, those of a group at once, and bring the weights given since home."""
        with self._on_device():
            self._bring_home()
            self._look()
            results: dict[int, Evaluation] = {}
            for members, group in zip(self._members, self._groups, strict=True):
                results |= zip(members, group.evaluate(), strict=True)
        return [results[i] for i in range(len(self.runs))]

    def _bring_home(self) -> None:
        """Copy the weights given since the last time into the histories."""
        since = slice(self._recorded, int(self._done))
        weights = torch.split(self._weights[since].cpu(), self._ks, dim=1)
        for i, run in enumerate(self.runs):
            run.history.weights[since] = weights[i].numpy()
        self._recorded = since.stop

    def _look(self) -> None:
        """Look at the uploads' lengths since the last time: at evaluations, whenever checkpoints are written."""
        since = slice(self._looked, int(self._done))
        norms, lengths = torch.split(self._norms[since].cpu(), self._ks, dim=1), self._lengths[since].cpu().numpy()
        for i, run in enumerate(self.runs):
            if since.start < since.stop:
                run.look_at(since.start + 1, norms[i].numpy(), lengths[:, i])
        self._looked = since.stop

    def state(self, round_: int) -> list[dict[str, Tensor]]:
        """Return what the runs need after a round, besides their models."""
        with self._on_device():
            self._bring_home()
            states: dict[int, dict[str, Tensor]] = {}
            for members, group in zip(self._members, self._groups, strict=True):
                states |= {i: group.state(place, round_) for place, i in enumerate(members)}
            unseen = slice(self._looked, round_)
            norms = torch.split(self._norms[unseen], self._ks, dim=1)
            lengths = self._lengths[unseen].T.contiguous()
            for i in range(len(self.runs)):
                states[i] |= {"unseen.norms": norms[i], "unseen.lengths": lengths[i]}
        return [states[i] for i in range(len(self.runs))]

    def restore(self, round_: int, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Put back what :meth:`state` returned after a round."""
        with self._on_device():
            for members, group in zip(self._members, self._groups, strict=True):
                for place, i in enumerate(members):
                    group.restore(place, round_, states[i])
            unseen = [(state["unseen.norms"], state["unseen.lengths"][:, None]) for state in states]
            self._looked = round_ - len(unseen[0][0])
            for table, parts in zip((self._norms, self._lengths), zip(*unseen, strict=True), strict=True):
                table[self._looked : round_] = torch.cat(parts, dim=1).to(self.device)
            self._done.fill_(round_)
        self._first, self._recorded = round_ + 1, round_

    def close(self) -> None:
        """Let the graph and what it holds go."""
        self._graph = None
