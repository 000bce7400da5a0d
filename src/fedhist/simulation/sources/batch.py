"""All clients of all runs at once, as one computation over static shapes that a CUDA graph replays.

The schedule is known, so a round is the same sequence of kernels every time: only tables, which live on
the device, and a counter decide what it works on.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedhist.clients.batched import BatchedTrainer, together
from fedhist.clients.net import Nets, net_key
from fedhist.clients.scores import Score
from fedhist.data.examples import TestSet
from fedhist.data.task import Task
from fedhist.errors import reason
from fedhist.simulation.run import Run
from fedhist.simulation.server import Server
from fedhist.simulation.sources import Close
from fedhist.simulation.sources.group import Batches, Group
from fedhist.simulation.sources.queue import Queue
from fedhist.strategies.arrivals import Arrivals

T = TypeVar("T")
WARM_UP = 1
"""Rounds before capture: libraries compile kernels and allocate their workspaces in the first one."""
STREAMS = 8
"""Pieces of a round that a captured graph may run at the same time."""


class Batch:
    """Takes runs through their rounds on one or several devices, which work at the same time."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs, self._begun = runs, False
        by_device: dict[torch.device, list[int]] = {}
        for i, run in enumerate(runs):
            by_device.setdefault(run.device, []).append(i)
        self._cards = [(members, _Card([runs[i] for i in members], device)) for device, members in by_device.items()]

    def play(self, close: Close) -> None:
        """Take a round; a replayed graph is only queued, so the next device need not wait."""
        if not self._begun:
            self._begun = True
            for run in self.runs:
                few = run.arriving.schedule.counts[0] < run.server.screen.first
                if run.server.screen.waits and (few or run.arriving.rejections):
                    Queue([run], BatchedTrainer(run.device)).measure()
        for _, card in self._cards:
            card.play(close)

    def next(self) -> Iterator[tuple[Server, Arrivals]]:
        """Deliver the next round of each run."""
        for _, card in self._cards:
            yield from card.next()

    def look(self) -> dict[int, int]:
        """Record the rounds closed since the last call; return the runs that had a bad upload, and in which round."""
        return {members[place]: round_ for members, card in self._cards for place, round_ in card.look().items()}

    def evaluate(self, choose: Callable[[Task], TestSet | None]) -> list[Score | None]:
        """Evaluate the models of all runs."""
        return _in_order((members, card.evaluate(choose)) for members, card in self._cards)

    def state(self) -> list[dict[str, Tensor]]:
        """Return the versions that clients hold and their last models, as :class:`Queue` has them."""
        return _in_order((members, card.state()) for members, card in self._cards)

    def restore(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Put back what :meth:`state` returned."""
        self._begun = any(run.server.round > 0 for run in self.runs)
        for members, card in self._cards:
            card.restore([states[i] for i in members])

    def close(self) -> None:
        """Release the CUDA graphs and their memory."""
        self._cards = []


class _Card:
    """The runs on one device."""

    def __init__(self, runs: Sequence[Run], device: torch.device) -> None:
        self.runs, self.device = runs, device
        self._rounds, self._first = runs[0].trial.rounds, 1
        self._round = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._counts = [run.arriving.schedule.counts.tolist() for run in runs]
        self._full = all(run.arriving.schedule.full for run in runs)
        self._delivered = 0
        self._capture_wanted = device.type == "cuda" and self._full and all(run.capturable() for run in runs)
        with self._on_device():
            self._streams = [torch.cuda.Stream() for _ in range(STREAMS)] if self._capture_wanted else []  # type: ignore[no-untyped-call]
        self._done = torch.zeros(1, dtype=torch.int64, device=device)  # rounds closed
        self._place = torch.zeros(1, dtype=torch.int64, device=device)  # of the next round in its block

        nets, known = Nets(device, many=True), dict[object, Batches]()
        members: dict[tuple[object, ...], list[int]] = {}
        for i, run in enumerate(runs):
            work = together(run.trial.local, run.trial.method.objective)
            members.setdefault((*net_key(run.task, run.trial.seed), *work), []).append(i)
        self._groups = [
            (places, Group([runs[i] for i in places], nets.of(runs[places[0]].task, runs[places[0]].trial.seed), known))
            for places in members.values()
        ]
        self._block = min(group.block for _, group in self._groups)
        for _, group in self._groups:
            group.allocate(self._block)

        # What the servers see of a round besides the uploads: one row per round, all runs beside each other.
        facts = [(s.staleness, s.clients, run.task.sizes[s.clients]) for run in runs for s in (run.arriving.schedule,)]
        tables = np.stack([np.concatenate(each, axis=1) for each in zip(*facts, strict=True)], axis=1)
        self._facts = torch.tensor(tables).to(device)
        self._ks = [run.arriving.schedule.k for run in runs]
        self._weights = torch.full((self._rounds, sum(self._ks)), torch.nan, device=device)
        self._norms = torch.zeros((self._rounds, sum(self._ks)), device=device)
        self._sums = torch.zeros((self._rounds, len(runs)), device=device)
        self._looked = 0

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    def play(self, close: Close) -> None:
        """Take all runs through one round."""
        self._round += 1
        with self._on_device(), torch.no_grad():
            place = (self._round - 1) % self._block
            if place == 0 or self._round == self._first:
                self._place.fill_(place)
                begin = self._round - 1 - place
                for _, group in self._groups:
                    group.draw(slice(begin, min(begin + self._block, self._rounds)))
            if self._graph is not None:
                self._graph.replay()
                return
            self._turn(close)
            if self._capture_wanted and self._round == self._first + WARM_UP - 1 and self._rounds > self._round:
                self._capture(close)

    def _turn(self, close: Close) -> None:
        for server, arrivals in self.next():
            close(server, arrivals)

    def _capture(self, close: Close) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            # Its own stream: PyTorch's default one belongs to the device that first captured anything.
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(self.device)):  # type: ignore[no-untyped-call]
                self._turn(close)
        except RuntimeError as error:
            warnings.warn(
                f"rounds run one kernel at a time, since CUDA cannot capture them: {reason(error)}", stacklevel=5
            )
            return
        self._graph = graph

    def next(self) -> Iterator[tuple[Server, Arrivals]]:
        """Deliver one round of all runs, without reading any value."""
        uploads = []
        for n, (members, group) in enumerate(self._groups):
            with self._aside(n):
                uploads.append((members, group.uploads(self._done, self._place)))
        self._join(len(self._groups))
        facts = torch.split(self._facts.index_select(0, self._done)[0], self._ks, dim=1)
        weights, norms, sums = list[Tensor](), list[Tensor](), list[Tensor]()
        for i, (run, whole) in enumerate(zip(self.runs, _in_order(uploads), strict=True)):
            with self._aside(i):  # what the server does before it asks for the next run's arrivals goes there too
                count = self._ks[i] if self._full else self._counts[i][self._delivered]
                rows, received, norm = (table[:count] for table in whole[:3])
                deltas, statistics, mail = run.parcel.parts(rows)
                more: dict[str, Any] = {
                    "mail": mail,
                    "statistics": statistics,
                    "received_from": partial(_itself, received),
                }
                staleness, clients, sizes = facts[i][:, :count]
                arrivals = Arrivals(deltas, staleness, clients, sizes, validate=False, **more)
                if run.adversary is not None:
                    arrivals = run.adversary.sent(arrivals, self._done)
                    norm = torch.linalg.vector_norm(arrivals.deltas, dim=1)
                yield run.server, arrivals
                given = run.server.strategy.last_weights
                weights.append(_wide(torch.full_like(norm, torch.nan) if given is None else given, self._ks[i]))
            norms.append(_wide(norm, self._ks[i]))
            sums.append(whole[3])
        self._join(len(self.runs))
        for table, parts in ((self._weights, weights), (self._norms, norms), (self._sums, sums)):
            table.index_copy_(0, self._done, torch.cat(parts)[None].to(table.dtype))
        self._done += 1
        self._place += 1
        self._delivered += 1

    @contextlib.contextmanager
    def _aside(self, n: int) -> Iterator[None]:
        """Let a captured graph do a piece of work at the same time as others.

        A piece allocates what it needs on the stream it runs on, so that no memory is used again by another before
        it is done.
        """
        if not (self._streams and torch.cuda.is_current_stream_capturing()):
            yield
            return
        side = self._streams[n % STREAMS]
        if n < STREAMS:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            yield

    def _join(self, count: int) -> None:
        """Wait for the first `count` pieces of work."""
        if self._streams and torch.cuda.is_current_stream_capturing():
            for side in self._streams[:count]:
                torch.cuda.current_stream().wait_stream(side)

    def look(self) -> dict[int, int]:
        """Record the rounds closed since the last call; return the runs that had a bad upload, and in which round."""
        leaving: dict[int, int] = {}
        with self._on_device():
            since = slice(self._looked, int(self._done))
            weights, norms = (torch.split(t[since].cpu(), self._ks, dim=1) for t in (self._weights, self._norms))
            sums = self._sums[since].cpu().numpy()
            for i, run in enumerate(self.runs):
                server, schedule = run.server, run.arriving.schedule
                if not run.active:
                    continue
                count = _fine_rounds(run, norms[i].numpy(), sums[:, i])
                rows, given = slice(since.start, since.start + count), weights[i][:count].numpy()
                who, stale, when = schedule.clients[rows], schedule.staleness[rows], schedule.arrived[rows]
                for each in run.arriving.rejected(rows):
                    server.note(each.round, each.time, each.event, client=each.client, reason=each.reason)
                server.keep(who, stale, when, given, schedule.cost(rows))
                if rows.stop == since.stop:
                    server.check_model()
                elif not np.isfinite(sums[count, i]):
                    server.diverge_by_model()
                else:
                    there = int(schedule.counts[rows.stop])
                    if run.arriving.foreseen is None:  # otherwise others are judged, who come where no fault is known
                        server.judge(norms[i][count][:there].tolist(), schedule.clients[rows.stop, :there].tolist())
                    if server.diverged is None:
                        leaving[i] = server.round + 1
        self._looked = since.stop
        return leaving

    def evaluate(self, choose: Callable[[Task], TestSet | None]) -> list[Score | None]:
        """Evaluate the models of all runs, those of a group at once."""
        with self._on_device():
            return _in_order((members, group.evaluate(choose)) for members, group in self._groups)

    def state(self) -> list[dict[str, Tensor]]:
        """Return what the runs need after the rounds so far, besides their servers."""
        with self._on_device():
            return _in_order((members, group.states(self._round)) for members, group in self._groups)

    def restore(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Put back what :meth:`state` returned."""
        done = max(run.server.round for run in self.runs)  # a run that diverged has stopped earlier
        with self._on_device():
            for members, group in self._groups:
                group.restore(done, [states[i] for i in members])
            self._done.fill_(done)
        self._round, self._first, self._looked, self._delivered = done, done + 1, done, done


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _wide(values: Tensor, k: int) -> Tensor:
    """Return a value for each of K uploads, zeros where a round has fewer."""
    return values if len(values) == k else torch.nn.functional.pad(values, (0, k - len(values)))


def _in_order(parts: Iterable[tuple[Sequence[int], Sequence[T]]]) -> list[T]:
    """Return results in the order of the runs, given for some of them at a time."""
    by_run = {i: result for members, results in parts for i, result in zip(members, results, strict=True)}
    return [by_run[i] for i in range(len(by_run))]


def _fine_rounds(run: Run, norms: NDArray[np.float32], models: NDArray[np.float32]) -> int:
    """Return how many of some rounds went well: by the lengths of uploads, ``(rounds, K)``, and the sums of models."""
    screen, begin = run.server.screen, run.server.round
    schedule, since = run.arriving.schedule, slice(begin, begin + len(norms))
    clients = [row[:n] for row, n in zip(schedule.clients[since].tolist(), schedule.counts[since], strict=True)]
    first_alarm = next((each.round for each in run.arriving.rejections if each.event == "rejected"), math.inf)
    for row, every in enumerate(norms.tolist()):
        lengths = every[: len(clients[row])]
        if screen.waits:
            if run.arriving.rejections:  # not one of the first uploads was good
                return row
            screen.begin(lengths)
        screen.alarmed |= begin + row + 1 >= first_alarm  # from its beginning on: some runs leave that need not
        if not np.isfinite(models[row]) or not screen.judge(lengths).fine:
            return row
        screen.accepted(clients[row], lengths)
    return len(norms)
