"""Rounds of all runs as one computation over static shapes, replayed as a CUDA graph.

The schedule is known, so a round is the same sequence of kernels every time: only tables, which live on
the device, and a counter decide what it works on.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from fedhist.arrivals import Arrivals
from fedhist.data.task import Task
from fedhist.simulation.run import Run
from fedhist.streams import Stream
from fedhist.training import Evaluation, LocalSGD
from fedhist.training.batched import ConvAsMatmul, descend, evaluate, padded
from fedhist.training.net import ModuleNet

BLOCK = 64
"""Rounds whose batches are drawn and sent to the device at a time, at most."""
TABLE = 1 << 24
"""Indices in such a table, at most."""
WARM_UP = 3
"""Rounds before capture: libraries allocate their workspaces in the first ones."""


class BatchedRounds:
    """Takes runs through their rounds, all clients of all runs at once."""

    def __init__(self, runs: Sequence[Run], local: LocalSGD, device: torch.device) -> None:
        self.runs, self.local, self.device = runs, local, device
        self._rounds, self._k = runs[0].schedule.rounds, runs[0].schedule.k
        self._done = torch.zeros(1, dtype=torch.int64, device=device)  # rounds closed
        self._place = torch.zeros(1, dtype=torch.int64, device=device)  # of the next round in its block
        self._graph: torch.cuda.CUDAGraph | None = None
        self._capture_wanted = device.type == "cuda" and all(
            run.strategy.capturable() and vars(type(run.method.objective)).get("branch_free", False) for run in runs
        )
        self._streams = [torch.cuda.Stream(device) for _ in runs[:8]] if self._capture_wanted else []  # type: ignore[no-untyped-call]

        # Where each round's version is stored, and where its uploads' versions lie; -1 is the spare slot.
        self._store = [torch.tensor(run.plan.slots[1:], device=device) % len(run.versions) for run in runs]
        self._fetch = [torch.tensor(run.plan.slots[run.schedule.versions], device=device) for run in runs]
        self._previous: dict[int, tuple[Tensor, Tensor]] = {}
        for i, run in enumerate(runs):
            if run.method.objective.uses_previous:
                models = torch.zeros((run.task.num_clients, run.model.numel()), dtype=run.model.dtype, device=device)
                self._previous[i] = models, torch.zeros(run.task.num_clients, dtype=run.model.dtype, device=device)

        # Runs that can share a batch of models: same data, same module, same objective.
        self._nets: dict[tuple[object, ...], ModuleNet] = {}
        self._groups: dict[tuple[object, ...], list[int]] = {}
        for i, run in enumerate(runs):
            objective = run.method.objective
            key = (*self._net_key(run), objective if isinstance(objective, Hashable) else id(objective))
            self._groups.setdefault(key, []).append(i)

        # Batches depend on the seed and its task, not on the method.
        largest = max(int(run.sizes.max()) for run in runs)
        self._shape = local.steps_for(largest), min(local.batch_size, largest)
        self._block = max(1, min(BLOCK, TABLE // (self._k * self._shape[0] * self._shape[1])))
        self._sources: dict[tuple[Task, int], tuple[Tensor, Tensor]] = {}
        for run in runs:
            shape = (self._block, self._k, *self._shape)
            if (run.task, run.seed) not in self._sources:
                index = torch.zeros(shape, dtype=torch.int64, device=device)
                self._sources[run.task, run.seed] = index, torch.zeros(shape, dtype=run.model.dtype, device=device)

    def _net_key(self, run: Run) -> tuple[object, ...]:
        """Like :func:`fedhist.training.net.net_key`, but shared by tasks that differ in their split alone."""
        return *run.task.data, id(run.task.model), run.seed if run.task.seed_matters else 0

    def _net(self, run: Run) -> ModuleNet:
        key = self._net_key(run)
        if key not in self._nets:
            self._nets[key] = ModuleNet(run.task.build(run.seed).to(self.device), run.task.layout)
        return self._nets[key]

    def step(self, round_: int) -> None:
        """Take all runs through one round."""
        if (round_ - 1) % self._block == 0:
            self._draw(round_)
        if self._graph is not None:
            self._graph.replay()
            return
        with torch.no_grad():
            self._round()
        if self._capture_wanted and round_ == WARM_UP and self._rounds > WARM_UP:
            self._capture()

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.no_grad(), torch.cuda.graph(graph):
                self._round()
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            warnings.warn(f"rounds run one kernel at a time, since CUDA cannot capture them: {reason}", stacklevel=5)
            return
        self._graph = graph

    def _draw(self, round_: int) -> None:
        """Draw the batches of the next rounds and put them where the rounds look for them."""
        self._place.zero_()
        for run in {(run.task, run.seed): run for run in self.runs}.values():
            stream, schedule = Stream(run.seed, "batches"), run.schedule
            rows = slice(round_ - 1, min(round_ - 1 + self._block, self._rounds))
            arriving = zip(
                schedule.clients[rows].ravel().tolist(), schedule.versions[rows].ravel().tolist(), strict=True
            )
            plans = [self.local.batches(run.task.client(c), stream.at(c, v)) for c, v in arriving]
            count = len(plans) // self._k
            for table, values in zip(self._sources[run.task, run.seed], padded(plans, *self._shape), strict=True):
                table[:count].copy_(values.view(count, self._k, *self._shape))

    def _round(self) -> None:
        """One round of all runs, without a look at any value."""
        deltas: list[Tensor] = [self._done] * len(self.runs)
        for members in self._groups.values():
            received = torch.stack([self._received(i) for i in members])
            for i, upload in zip(members, self._trained(members, received), strict=True):
                deltas[i] = upload
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        main = torch.cuda.current_stream() if capturing else None
        for i in range(len(self.runs)):
            # The runs' servers do not depend on each other, so the graph may run them side by side.
            side = self._streams[i % len(self._streams)] if main else None
            if side and main:
                side.wait_stream(main)
            with torch.cuda.stream(side) if side else contextlib.nullcontext():
                self._close(i, deltas[i])
        if main:
            for side in self._streams:
                main.wait_stream(side)
        self._done += 1
        self._place += 1

    def _now(self, table: Tensor) -> Tensor:
        """Return a table's row for this round."""
        return table.index_select(0, self._done)[0]

    def _received(self, i: int) -> Tensor:
        """Store the version that opens this round and return the ones its uploads build on, ``(K, P)``."""
        run = self.runs[i]
        run.versions.index_copy_(0, self._now(self._store[i][:, None]), run.model[None])
        return run.versions.index_select(0, self._now(self._fetch[i]))

    def _trained(self, members: Sequence[int], received: Tensor) -> Tensor:
        """Return the uploads of some runs, ``(runs, K, P)``."""
        first = self.runs[members[0]]
        flat = received.flatten(0, 1)
        tables = zip(*(self._sources[self.runs[i].task, self.runs[i].seed] for i in members), strict=True)
        index, weight = (torch.cat([t.index_select(0, self._place)[0] for t in column]) for column in tables)
        previous, has_previous = flat, flat.new_zeros(len(flat))
        if first.method.objective.uses_previous:
            kept = [(*self._previous[i], self._now(self.runs[i].clients)) for i in members]
            has_previous = torch.cat([known.index_select(0, clients) for _, known, clients in kept])
            own = torch.cat([models.index_select(0, clients) for models, _, clients in kept])
            previous = torch.where(has_previous[:, None] > 0, own, flat)
        x, y, _, _ = first.task.on(self.device)
        with ConvAsMatmul() if self.device.type == "cuda" else contextlib.nullcontext():
            uploads = descend(
                self._net(first),
                self.local,
                first.method.objective,
                flat,
                previous,
                has_previous,
                (index, weight),
                (x, y),
            )
        uploads = uploads.view(received.shape)
        if first.method.objective.uses_previous:
            for (models, known, clients), sent, upload in zip(kept, received, uploads, strict=True):
                models.index_copy_(0, clients, sent - upload)
                known.index_fill_(0, clients, 1)
        return uploads

    def _close(self, i: int, deltas: Tensor) -> None:
        run = self.runs[i]
        staleness, clients, sizes = (self._now(table) for table in (run.staleness, run.clients, run.sizes))
        run.aggregate(Arrivals(deltas, staleness, clients, sizes, validate=False))
        if run.strategy.last_weights is not None:
            run.weights.index_copy_(0, self._done, run.strategy.last_weights[None].to(run.weights.dtype))

    def evaluate(self) -> list[Evaluation]:
        """Evaluate all runs' models, those on the same data at once."""
        groups: dict[tuple[object, ...], list[int]] = {}
        for i, run in enumerate(self.runs):
            groups.setdefault(self._net_key(run), []).append(i)
        results: dict[int, Evaluation] = {}
        for members in groups.values():
            first = self.runs[members[0]]
            models = torch.stack([self.runs[i].model for i in members])
            results |= zip(members, evaluate(first.task, self._net(first), models), strict=True)
        return [results[i] for i in range(len(self.runs))]

    def close(self) -> None:
        """Let the graph and what it holds go."""
        self._graph = None
