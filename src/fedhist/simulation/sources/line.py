"""One run's clients at work, taken in order of arrival."""

import contextlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedhist.clients.job import Computed, Job, Trainer, Work, compute
from fedhist.errors import BadUpload, InvalidInput, require
from fedhist.simulation.run import Run
from fedhist.simulation.versions import Models, Versions
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.screening import NOT_FINITE, Rejected, Upload, Verdict, norm_of
from fedhist.world.clocks import AnyClock, clock_of
from fedhist.world.faults import Dropped, arrived
from fedhist.world.foreseen import REJECTED_IN_A_ROW
from fedhist.world.schedule import Start, Timetable


class _Taken(NamedTuple):
    """An upload that was accepted, as the strategy will see it, and its length."""

    start: Start
    row: Tensor
    norm: float


class Line:
    """One run's clients at work.

    While every upload is accepted, arrivals follow the schedule that was planned. A rejected upload changes who
    arrives from there on, so a clock takes the schedule's place; until then both give the same arrivals.
    """

    def __init__(self, run: Run, trainer: Trainer) -> None:
        self.run, self.server, self._trainer = run, run.server, trainer
        self._trial, self._parcel = run.trial, run.parcel
        self._feed: Timetable | AnyClock = self._clock() if run.trial.faults else Timetable(run.arriving.schedule, 0)
        self._versions, self._last_models = Versions(), Models()
        self._uploads: dict[tuple[int, int], Computed] = {}
        """By client and version: those that have not arrived yet. Not by the number of the start, which a rejection
        may give to somebody else than was expected."""
        self._rounds: dict[int, Tensor] = {}
        """The uploads of rounds to come, ``(K, P)`` each, while it is known who will be in them."""
        self._closing: list[Start] = []

    def _new_clock(self) -> AnyClock:
        return clock_of(self._trial.fleet(), self._trial.rule, self._trial.concurrency, rejecting=True)

    def _clock(self) -> AnyClock:
        """Return the clock as it stands before the round under way, if nothing was rejected but what was foreseen."""
        clock, foreseen = self._new_clock(), self.run.arriving.foreseen
        if foreseen is None:
            clock.advance(self.server.round)
        else:
            for _ in range(self.server.round):
                foreseen.round(clock)
        return clock

    def _held(self) -> list[int]:
        """Return the versions of closed rounds that clients are at work on, in order."""
        if isinstance(self._feed, Timetable):
            held: list[int] = self.run.arriving.versions.held_after(self.server.round).tolist()
            return held
        return sorted({*self._feed.versions.tolist()} - {self._round})

    @property
    def _round(self) -> int:
        """The round under way."""
        return self.server.round + 1

    def begin(self) -> Work:
        """Open a round; return the uploads that can be computed now.

        Those of the next round that build on a version there is need not wait for this round to close.
        """
        self._versions.publish(self._round, self.server.version)
        work = self._begun(self._feed.expected(), 0)
        if self._trainer.works_ahead and self._round < self._trial.rounds:
            work += self._begun(self._feed.expected(1), 1)
        return work

    def _begun(self, starts: Sequence[Start], ahead: int) -> Work:
        work: Work = []
        for place, start in enumerate(starts):
            if start.work not in self._uploads and start.version <= self._round:
                upload = self._uploads[start.work] = Computed(self._row(ahead, place, len(starts)))
                work.append((ahead, self._job(start), upload))
        return work

    def _row(self, ahead: int, place: int, count: int) -> Tensor:
        """Return where to put an upload: new memory every round, since a strategy may keep what it is given."""
        if not isinstance(self._feed, Timetable):
            return self._empty()
        if self._round + ahead not in self._rounds:
            self._rounds[self._round + ahead] = self._empty(count)
        return self._rounds[self._round + ahead][place]

    def _empty(self, *rows: int) -> Tensor:
        """Return room for an upload, or for several."""
        return self.server.version.new_empty((*rows, self._parcel.row_width))

    def _job(self, start: Start) -> Job:
        trial, received, last = self._trial, self._versions[start.version], self._last_models.get(start.client)
        what = self.run.task, trial.local, trial.method.objective, trial.seed
        return Job(*what, start.client, start.version, received, last, trial.rounds)

    def arrivals(self) -> Arrivals | None:
        """Return the round's arrivals, once K uploads are accepted; None if the run ends instead."""
        starts = self._feed.expected()
        if not starts:
            self._next(0)  # which ends the run, since nobody comes any more
            return None
        uploads = [self._uploads[start.work].ready() for start in starts]
        deltas = self._rounds.pop(self._round) if self._round in self._rounds else torch.stack(uploads)
        if self.server.screen.waits:
            self.measure()
        arrivals = self._sent(deltas, starts)
        lengths = torch.linalg.vector_norm(arrivals.deltas, dim=1)
        norms: list[float] = (lengths + self._parcel.flaw(deltas)).tolist()
        whole = [place for place, start in enumerate(starts) if self._fault(start) is None]  # others will not count
        verdict = self.server.judge([norms[place] for place in whole], [starts[place].client for place in whole])
        if self.server.diverged is not None:
            return None
        if verdict.fine and self._trial.faults is None:
            self._take(starts)
            if self.server.diverged is not None:
                return None
        elif not verdict.rejected and self._trial.schedule is not None:  # shortened, and nobody else has to come
            arrivals, norms = self._clipped(arrivals, starts, starts)
        else:
            taken = self._one_by_one() if self._follow_clock(verdict) else None
            if taken is None or self.server.diverged is not None:
                return None
            starts, norms = [each.start for each in taken], [each.norm for each in taken]
            rows = torch.stack([each.row for each in taken])
            arrivals = self._arrivals(rows, starts)
            if self._colluding:
                arrivals, norms = self._clipped(self._sent(rows, starts), starts, [*filter(self._waits, starts)])
        self.server.screen.accepted([start.client for start in starts], norms)
        self._settle(starts)
        self._closing = starts
        return arrivals

    def closed(self) -> None:
        """Write the round down, and send the new version to those who were in it."""
        closing = self._closing  # not the arrivals, which a strategy may have changed
        staleness = [self._round - start.version + 1 for start in closing]
        clients, times = [start.client for start in closing], [start.time for start in closing]
        self.server.keep_round(clients, staleness, times, self._feed.close(closing))
        self._versions.keep(self._held())
        self._uploads = {work: each for work, each in self._uploads.items() if work[1] in self._versions}
        if not self._trainer.works_ahead:
            self._uploads.clear()  # what was computed and has not arrived, as a resumed run would not have it

    @property
    def _colluding(self) -> bool:
        return self.run.adversary is not None and self.run.adversary.attack.colludes

    def _arrivals(self, rows: Tensor, starts: Sequence[Start]) -> Arrivals:
        deltas, statistics, mail = self._parcel.parts(rows)
        clients = np.array([start.client for start in starts])
        versions = np.array([start.version for start in starts])
        facts = self._round - versions + 1, clients, self.run.task.sizes[clients]
        staleness, ids, sizes = (torch.from_numpy(fact).to(deltas.device) for fact in facts)
        held, size = [self._versions[start.version] for start in starts], deltas.shape[1]
        return Arrivals(
            deltas,
            staleness,
            ids,
            sizes,
            validate=False,
            mail=mail,
            statistics=statistics,
            received_from=lambda: torch.stack([version[:size] for version in held]),
        )

    def _sent(self, rows: Tensor, starts: Sequence[Start]) -> Arrivals:
        """Return what arrives of honest uploads."""
        honest = self._arrivals(rows, starts)
        adversary = self.run.adversary
        return honest if adversary is None else adversary.sent(honest, torch.tensor(self._round - 1))

    def _settle(self, starts: Sequence[Start]) -> None:
        """Forget uploads that have arrived; the clients themselves remember what they trained."""
        for start in starts:
            row = self._uploads.pop(start.work).ready()
            if self._trial.method.objective.uses_previous:
                kept = row[self._parcel.kept]
                if bool(torch.isfinite(kept.sum())):  # a training that failed leaves nothing behind
                    self._last_models[start.client] = kept.clone()

    def _follow_clock(self, verdict: Verdict) -> bool:
        """Let a clock take the place of the schedule, which no longer holds; return whether there is one."""
        if not isinstance(self._feed, Timetable):
            return True
        if self._trial.schedule is not None:
            reason = next(iter(verdict.rejected.values()))
            what = f"in round {self._round} an upload is bad ({reason}), and a recorded schedule has no other"
            self.server.diverge(self._round, what)
            return False
        self._feed, self._rounds = self._clock(), {}
        return True

    def _take(self, starts: Sequence[Start]) -> None:
        """Let a clock know that a round's uploads are all accepted."""
        if not isinstance(self._feed, Timetable):
            for count in range(len(starts) + 1):
                self._next(count)

    def _one_by_one(self) -> list[_Taken] | None:
        """Take in arrivals until the round closes; None if too many in a row are rejected."""
        taken: list[_Taken] = []
        in_a_row = injected = overdone = 0
        while (start := self._next(len(taken))) is not None or (rejected := self._overdone(taken)):
            if start is None:
                overdone += rejected
                if overdone >= REJECTED_IN_A_ROW:
                    what = f"{overdone} uploads of attackers were rejected"
                    self.server.diverge(self._round, f"{what} in round {self._round} while nobody else's came")
                    return None
                continue
            try:
                taken.append(self._judged(start))
                in_a_row = injected = 0
                overdone *= start.client in self.server.attackers
            except Rejected as reason:
                self._reject(start, reason)
                in_a_row, injected = in_a_row + 1, injected + (self._fault(start) is not None)
                if in_a_row == REJECTED_IN_A_ROW:
                    what = (
                        f"{in_a_row} uploads in a row were rejected in round {self._round}, the last because {reason}"
                    )
                    hint = "the faults that were asked for leave nothing to aggregate" if injected == in_a_row else None
                    self.server.diverge(self._round, what, hint)
                    return None
        return taken

    def _next(self, accepted: int) -> Start | None:
        """Return the next arrival, computed together with those that may follow; the run ends where nobody comes."""
        assert not isinstance(self._feed, Timetable)
        try:
            start = self._feed.next(accepted)
        except InvalidInput as error:
            hint = "let clients stay longer, or reject fewer uploads"
            self.server.diverge(self._round, str(error).rstrip("."), hint)
            return None
        if start is not None and start.work not in self._uploads:
            compute(self._trainer, self._begun([start, *self._feed.expected(accepted=accepted + 1)], 0))
        return start

    def _fault(self, start: Start) -> str | None:
        """Return what happens to an upload on its way."""
        trial = self._trial
        return None if trial.faults is None else trial.faults.kind(trial.seed, start.client, start.number)

    def measure(self) -> None:
        """Tell the screen how long the first uploads are: those of the round, and more where it takes too few."""
        self._versions.publish(self._round, self.server.version)
        known = self._feed.expected(), self._feed.upcoming(self.server.screen.first)
        starts = [start for start in max(known, key=len) if start.version <= self._round]
        more = [start for start in starts if start.work not in self._uploads]
        uploads = {start.work: Computed(self._empty()) for start in more}
        compute(self._trainer, [(0, self._job(start), uploads[start.work]) for start in more])
        uploads |= self._uploads
        sent = self._sent(torch.stack([uploads[start.work].ready() for start in starts]), starts).deltas
        norms = []
        for start, delta in zip(starts, sent, strict=True):
            with contextlib.suppress(Rejected):
                norms.append(self._arrived(start, delta)[1])
        self.server.screen.begin(norms)

    def _arrived(self, start: Start, sent: Tensor) -> tuple[Tensor, float]:
        """Return what arrives of an upload that was sent, and its length; raise if it has not the right form."""
        honest = Upload(sent, start.client, start.version)
        return arrived(self._fault(start), honest, self._trial.task.num_clients, self._round)

    def _judged(self, start: Start) -> _Taken:
        """Return an upload that is accepted; raise if it is not."""
        row = self._uploads[start.work].ready()
        sent = self._parcel.parts(row)[0]
        if self.run.adversary is not None and not self._colluding:
            sent = self._sent(row[None], [start]).deltas[0]
        delta, norm = self._arrived(start, sent)
        if not bool(torch.isfinite(torch.as_tensor(self._parcel.flaw(row)))):
            raise Rejected(NOT_FINITE)
        scale = 1.0 if self._waits(start) and math.isfinite(norm) else self._scale(start, norm)
        delta = delta if scale == 1 else delta * scale
        return _Taken(start, torch.cat([delta, row[len(delta) :]]), norm * scale)

    def _waits(self, start: Start) -> bool:
        """Whether what a client sends is known, and judged, only when the round would close."""
        return self._colluding and start.client in self.server.attackers and self._fault(start) is None

    def _scale(self, start: Start, norm: float) -> float:
        """Return the factor to multiply an upload by; raise if it is not accepted."""
        scale = self.server.screen.admit(norm)
        if scale < 1:
            self._note(start, "clipped", f"its length was {norm:.3g}")
        return scale

    def _clipped(
        self, sent: Arrivals, starts: Sequence[Start], judged: Collection[Start]
    ) -> tuple[Arrivals, list[float]]:
        """Return the uploads of a round, of which those that are judged now are clipped where that is the policy."""
        norms = [norm_of(delta) for delta in sent.deltas]
        scales = [  # none is rejected now
            self._scale(start, norm) if start in judged else 1.0 for start, norm in zip(starts, norms, strict=True)
        ]
        factors = torch.tensor(scales, dtype=sent.deltas.dtype, device=sent.deltas.device)
        lengths = [norm * scale for norm, scale in zip(norms, scales, strict=True)]
        return replace(sent, deltas=sent.deltas * factors[:, None], validate=False), lengths

    def _overdone(self, taken: list[_Taken]) -> int:
        """Reject colluding uploads that are too long; return how many there were."""
        if not self._colluding or self.server.diverged is not None:
            return 0
        sent = self._sent(torch.stack([each.row for each in taken]), [each.start for each in taken]).deltas
        kept = []
        for each, delta in zip(taken, sent, strict=True):
            try:
                if self._waits(each.start):
                    self.server.screen.admit(norm_of(delta))
                kept.append(each)
            except Rejected as reason:
                self._reject(each.start, reason)
        overdone = len(taken) - len(kept)
        taken[:] = kept
        return overdone

    def _reject(self, start: Start, reason: Rejected) -> None:
        """Let a client whose upload was not accepted start again from the current model."""
        dropped = isinstance(reason, Dropped)
        if not dropped and self.server.screen.policy == "stop":
            raise BadUpload(f"{self._trial}: client {start.client}'s upload in round {self._round} is bad: {reason}.")
        self._note(start, "dropped" if dropped else "rejected", str(reason))
        self.server.screen.alarmed |= not dropped
        self._settle([start])
        assert not isinstance(self._feed, Timetable)
        self._feed.again(start, arrived=not dropped)

    def _note(self, start: Start, event: str, reason: str) -> None:
        self.server.note(self._round, start.time, event, client=start.client, reason=reason)

    def state(self) -> dict[str, Tensor]:
        """Return what the rounds to come depend on; uploads computed ahead come out the same again."""
        state = dict(zip(("held", "versions"), self._versions.state(), strict=True))
        if self._trial.method.objective.uses_previous:
            state |= zip(("previous.clients", "previous"), self._last_models.state(), strict=True)
        if not isinstance(self._feed, Timetable):
            state |= {f"clock.{name}": torch.from_numpy(array) for name, array in self._feed.state().items()}
        return state

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Put back what :meth:`state` returned."""
        trial, version, done = self._trial, self.server.version, self.server.round
        clock = {name.removeprefix("clock."): t.numpy() for name, t in state.items() if name.startswith("clock.")}
        planned = trial.faults is None or self.run.arriving.foreseen is not None
        require(trial.schedule is None if clock else planned, "its arrivals come from elsewhere")
        if clock:
            self._feed = self._new_clock()
            self._feed.restore(clock)
            require(self._feed.round == done, f"its clock has closed {self._feed.round} rounds instead of {done}")
        else:
            self._feed = Timetable(self.run.arriving.schedule, done) if trial.faults is None else self._clock()
        self._versions = Versions()
        self._versions.restore(state["held"], state["versions"], version, self._held())
        if trial.method.objective.uses_previous:
            clients, models = state["previous.clients"], state["previous"]
            self._last_models.restore(clients, models, self.server.model, range(trial.task.num_clients))
        self._uploads, self._rounds = {}, {}
