"""A server closes rounds: what holds for every round, simulated, deployed or replayed, is here and nowhere else."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedhist.data.layout import Layout
from fedhist.errors import DivergedError, InvalidInput, require
from fedhist.simulation.methods import Method
from fedhist.simulation.rows import Rows
from fedhist.simulation.server_options import ServerOptions
from fedhist.store.evaluation import LARGEST_METRIC, Evaluation, check_evaluations
from fedhist.store.events import EventLog
from fedhist.store.history import DIVERGED, History
from fedhist.store.measure import ACCURACY
from fedhist.store.recording import About, Tape
from fedhist.store.snapshot import check_forms
from fedhist.store.tables import check_per_client, check_traces, checked_arrivals
from fedhist.strategies import FedAvg, Strategy
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.memory import changed_outside_buffers, outside_buffers, prepared
from fedhist.strategies.screening import Screen, Verdict, norm_of

ENOUGH_BAD = 5
"""Bad uploads in a round, at least, for the run to count as diverged."""
HOPELESS_LOSS = 1000.0
"""How many times the first model's loss counts as diverged, although it is finite."""
MOST_TRACES = 200
"""Most evaluations at which the strategy is asked for traces; if there are more, evenly spaced ones."""


class Averaged:
    """An exponential moving average of the models after each round, which begins as their plain mean."""

    def __init__(self, decay: float, like: Tensor) -> None:
        self.decay, self.mean = decay, like.clone()
        self.rounds = torch.zeros((), dtype=torch.float64, device=like.device)  # so that a captured round counts

    def add(self, version: Tensor) -> None:
        """Take in the model after another round: `m ← d·m + (1-d)·w` with `d = min(decay, 1 - 1/t)`."""
        self.rounds += 1
        share = (1 / self.rounds).clamp_min(1 - self.decay)
        self.mean.lerp_(version[: len(self.mean)], share.to(version.dtype))


class Server:
    """The model, the strategy that changes it, the screen for bad uploads, and the history of it all.

    Parameters
    ----------
    options
        The server's options.
    version
        The first version, updated in place: the model's parameters, and whatever else clients are sent.
    num_clients, rounds
        How many different clients may take part, and how many rounds there is room for.
    history
        An empty history that says what the run is.
    layout
        Where the model's parts lie in a version; without one a version is the parameters alone.
    seed
        The seed of a simulation, from which a strategy's random numbers follow; None in a deployment.
    name, hint
        The run's name in error messages, and what they advise.
    """

    def __init__(
        self,
        options: ServerOptions,
        version: Tensor,
        num_clients: int,
        rounds: int,
        history: History,
        *,
        layout: Layout | None = None,
        seed: int | None = None,
        tape: Tape | None = None,
        eval_every: int = 1,
        name: str | None = None,
        hint: str = "check the data and the learning rate",
    ) -> None:
        self.options, self.method, self.history, self.tape, self.layout = options, options.method, history, tape, layout
        self.place(version)
        model = self.model
        self.strategy = prepared(
            options.method.strategy, num_clients, options.k, len(model), model.dtype, model.device, seed
        )
        self._send_along()
        self.averaged: Averaged | None = None
        if options.ema is not None:
            self.averaged = Averaged(options.ema, self.shown)
        judging = not self.strategy.bounds_uploads
        policy, ratio = options.bad_updates, options.max_norm_ratio
        self.screen = Screen(policy, ratio, norm_of(model), num_clients, judging=judging)
        self.round = 0
        """Rounds that are closed."""
        self.attackers: frozenset[int] = frozenset()
        """Clients that are known to attack, in a simulation of it."""
        self.diverged: DivergedError | None = None
        """Why this run has ended early."""
        self.first_loss: float | None = None
        """The loss of the first model, if it is known."""
        self._name, self._hint, self._num_clients = name or options.method.name, hint, num_clients
        rule = getattr(options, "rule", None)
        width = options.k if rule is None or rule.enough is not None else 1  # it grows as needed
        self._rows, self._events = Rows(rounds, width), EventLog(history.events)
        evaluations = -(-rounds // eval_every)
        self._trace_every, self._rounds = eval_every * -(-evaluations // MOST_TRACES), rounds
        self._outside = outside_buffers(self.strategy)
        self._rows.show(history, 0)
        warn_if_weights_vanish(options.method, options.k)

    def place(self, version: Tensor) -> None:
        """Let the current version lie in a vector."""
        size = len(version) if self.layout is None else self.layout.size
        self.version = version
        """What clients are sent: the model, its statistics, and the strategy's mail."""
        self.model = version[:size]

    @property
    def shown(self) -> Tensor:
        """What is evaluated and kept as the result: the parameters and statistics, or their moving average."""
        if self.averaged is not None:
            return self.averaged.mean
        return self.model if self.layout is None else self.version[: self.layout.width]

    def _send_along(self) -> None:
        """Put the strategy's mail into the version that clients are sent."""
        width = len(self.version) if self.layout is None else self.layout.width
        if len(self.version) > width:
            mail = getattr(self.strategy, "mail", None)
            fits = isinstance(mail, Tensor) and mail.shape == self.model.shape
            shape = tuple(self.model.shape)
            require(fits, f"{self.method.name} must have a buffer `mail` of shape {shape}, for its clients use it.")
            self.version[width:].copy_(self.strategy.mail)

    def _average_statistics(self, arrivals: Arrivals) -> None:
        """Average clients' running statistics as on a network; counts grow by the average."""
        if arrivals.statistics is None or self.layout is None:
            return
        mean = self.strategy.average_statistics(arrivals)
        own = self.version[self.layout.size : self.layout.width]
        own.copy_(torch.where(self.layout.counts.to(own.device), own + mean.round(), mean))

    def judge(self, norms: Sequence[float], clients: Sequence[int]) -> Verdict:
        """Judge the uploads of the round under way by their lengths; the run ends if most of them are bad.

        Then the run, not single clients, is at fault. Those that are known to attack do not count.
        """
        verdict, round_, k = self.screen.judge(norms), self.round + 1, len(norms)
        reasons = [reason for place, reason in verdict.rejected.items() if clients[place] not in self.attackers]
        if self.screen.policy != "stop" and 2 * len(reasons) > k and len(reasons) >= ENOUGH_BAD:
            self.diverge(round_, f"{len(reasons)} of {k} uploads in round {round_} are bad (the last: {reasons[-1]})")
        return verdict

    def close(self, arrivals: Arrivals) -> Tensor:
        """Let the strategy aggregate a round's uploads, take the step, and return the update.

        Reads no value, so that it can be captured in a CUDA graph.
        """
        if self.tape is not None and not self.strategy.bounds_uploads:
            self.tape.take(arrivals.deltas, arrivals.num_examples)
        given = self.model._version
        update = self.strategy(replace(arrivals, model=self.model))
        changed = self.model._version != given
        require(not changed, f"{self.method.name} changed arrivals.model, which is the server's own; copy it first.")
        require(
            isinstance(update, Tensor) and update.shape == self.model.shape,
            f"strategy {self.method.name} must return a tensor of shape {tuple(self.model.shape)}, "
            f"got {getattr(update, 'shape', type(update))}.",
        )
        if self.tape is not None:
            if self.strategy.bounds_uploads:  # as they came they are nobody else's business
                if (seen := self.strategy.last_seen) is None:
                    raise InvalidInput(f"{self.method.name} does not say which uploads may be recorded.")
                self.tape.take(seen, arrivals.num_examples)
            self.tape.took(update)
        self.model.sub_(update, alpha=self.options.server_lr)  # Eq. 4
        self._average_statistics(arrivals)
        self._send_along()
        if self.averaged is not None:
            self.averaged.add(self.version)
        return update

    def keep(
        self,
        clients: ArrayLike,
        staleness: ArrayLike,
        arrived: ArrayLike,
        weights: ArrayLike | None,
        costs: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        """Write down who closed the next round or rounds, ``(k,)`` or ``(rounds, k)`` each, and what they have cost.

        A round with fewer than K uploads is filled up with client -1.
        """
        uploads = {"clients": clients, "staleness": staleness, "arrived": arrived, "weights": weights}
        self.round += self._rows.add(self.round, uploads, costs)
        self._rows.show(self.history, self.round)

    def keep_round(
        self,
        clients: ArrayLike,
        staleness: ArrayLike,
        arrived: ArrayLike,
        costs: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        """Write down the round that was closed just now, and check the model it made."""
        weights = self.strategy.last_weights
        self.keep(clients, staleness, arrived, None if weights is None else weights.detach().cpu().numpy(), costs)
        self.check_model()

    @property
    def time(self) -> float:
        """When the last round was closed."""
        return self._rows.closed(self.round)

    def note(self, round_: int, time: float, event: str, **more: object) -> None:
        """Keep an event for the history."""
        self._events.add(round_, time, event, **more)

    def check_model(self) -> None:
        """Notice a model that has become NaN or infinite in the last round."""
        if not bool(torch.isfinite(self.version.sum())):
            self.diverge_by_model()

    def diverge_by_model(self) -> None:
        """End this run for its model, or for the weights that have made it what it is where uploads are finite."""
        history, round_ = self.history, self.round
        weighed = self.strategy.last_weights is not None and self.screen.policy != "accept" and round_ > 0
        if weighed and not np.isfinite(history.weights[-1][history.clients[-1] >= 0]).all():
            hint = f"uploads are finite, so it is the rule of {self.method.name}"
            self.diverge(round_, f"weights became NaN or infinite in round {round_}", hint)
        else:
            self.diverge(round_, f"the model became NaN or infinite in round {round_}")

    def diverge(self, round_: int, what: str, hint: str | None = None) -> None:
        """End this run; those beside it continue."""
        if self.diverged is None:
            self.diverged = DivergedError(f"{self._name}: {what}; {hint or self._hint}.")
            self.note(round_, self._rows.closed(min(round_, self.round)), DIVERGED, reason=what)

    def evaluated(
        self,
        round_: int,
        values: Mapping[str, float],
        loss: float | None,
        per_class: list[float | None],
        epsilon: float | None,
    ) -> None:
        """Append an evaluation of the model after a round to the history."""
        if loss is not None and not math.isfinite(loss):
            self.diverge(round_, f"the loss after round {round_} is {loss}")
            loss = None
        elif loss is not None and self.hopeless(loss):
            self.diverge(
                round_, f"the loss after round {round_} is {loss:.3g}, that of the first model {self.first_loss:.3g}"
            )
        before = self.history.evaluations[-1].round if self.history.evaluations else 0
        mean_staleness, max_staleness = self.history.staleness_between(before, round_)
        time = self._rows.closed(round_)
        known = {name: value if abs(value) <= LARGEST_METRIC else None for name, value in values.items()}
        accuracy = known.pop(ACCURACY, None)
        staleness = mean_staleness, max_staleness
        self.history.evaluations.append(
            Evaluation(round_, time, accuracy, loss, per_class, *staleness, epsilon, known or None)
        )

    def hopeless(self, loss: float) -> bool:
        """Whether a loss means that the run has diverged; noise that protects uploads may take it anywhere."""
        bounded = self.strategy.bounds_uploads
        return not bounded and self.first_loss is not None and loss > HOPELESS_LOSS * self.first_loss > 0

    def trace(self, round_: int) -> None:
        """Keep what the strategy wants to be seen of its memory, if this round is one of those kept."""
        if round_ % self._trace_every == 0 or round_ == self._rounds:
            kept = {name: vector.detach().float().cpu().numpy() for name, vector in self.strategy.trace().items()}
            if kept and all(np.isfinite(values).all() for values in kept.values()):
                self.history.trace(round_, kept)

    def hidden_state(self) -> str | None:
        """Return an attribute of the strategy that has changed and that a checkpoint does not hold; None if all is."""
        return changed_outside_buffers(self.strategy, self._outside)

    def refuse_hidden_state(self) -> None:
        """Raise if the strategy has changed what a checkpoint does not hold."""
        name = self.hidden_state()
        require(
            name is None,
            f"{self.method.name} changes its attribute {name!r}, which is not a buffer, so a checkpoint would lose it; "
            "use register_buffer() in setup().",
        )

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return all that the rounds to come depend on, and the history so far: tensors, and plain values."""
        history = self.history
        tensors = {"model": self.version}
        if self.averaged is not None:
            tensors |= {"averaged": self.averaged.mean, "averaged.rounds": self.averaged.rounds}
        tensors |= {f"strategy.{name}": value for name, value in self.strategy.state_dict().items()}
        tensors |= {f"rows.{name}": torch.from_numpy(table) for name, table in self._rows.first(self.round).items()}
        tensors |= {f"traces.{name}": torch.from_numpy(values) for name, values in history.traces.items()}
        tensors |= {f"per_client.{name}": torch.from_numpy(values) for name, values in history.per_client.items()}
        return tensors, {
            "id": history.id,
            "round": self.round,
            "evaluations": [vars(evaluation) for evaluation in history.evaluations],
            "events": list(history.events),
            "diverged": None if self.diverged is None else str(self.diverged),
            "screen": self.screen.state(),
        }

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Put back what :meth:`state` returned, or raise a ValueError if it is not of such a run."""
        history, done = self.history, int(facts["round"])
        require(0 <= done <= self._rounds, f"it is of round {done} of {self._rounds}")
        now, _ = self.state()
        check_forms(
            tensors,
            {name: tensor for name, tensor in now.items() if not name.startswith(("rows.", "traces.", "per_client."))},
        )
        rows = {name: tensor.numpy() for name, tensor in _below("rows", tensors).items()}
        traces, per_client = (
            {name: tensor.numpy() for name, tensor in _below(table, tensors).items()}
            for table in ("traces", "per_client")
        )
        evaluations = [Evaluation(**evaluation) for evaluation in facts["evaluations"]]
        rows |= checked_arrivals(rows)
        length, width = rows["clients"].shape
        fits = length == done and width <= self.options.k and rows["clients"].max(initial=0) < self._num_clients
        require(
            fits, f"its arrivals are not of {done} rounds of {self.options.k} uploads of {self._num_clients} clients"
        )
        check_evaluations(evaluations, done)
        check_traces(traces, done, history.about_clients)
        check_per_client(per_client, done, history.about_clients)
        self.version.copy_(tensors["model"])
        if self.averaged is not None:
            self.averaged.mean.copy_(tensors["averaged"])
            self.averaged.rounds.copy_(tensors["averaged.rounds"])
        self.strategy.load_state_dict(_below("strategy", tensors))
        self.round = done
        self._rows.restore(rows)
        self._rows.show(history, done)
        history.per_client = per_client
        history.traces, history.evaluations[:] = traces, evaluations
        self._events.restore(facts["events"])
        history.id = str(facts.get("id") or history.id)
        self.diverged = None if facts["diverged"] is None else DivergedError(facts["diverged"])
        self.screen.restore(facts["screen"])


def about_recording(
    options: ServerOptions, rounds: int, num_params: int, num_clients: int, model_dtype: str, seed: int = 0
) -> About:
    """Return what a recording of a server's uploads is of."""
    dtype, lr = options.record_dtype or model_dtype, float(options.server_lr)
    return About(rounds, options.k, num_params, num_clients, dtype, model_dtype, lr, options.method.name, seed)


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix and a dot, without these."""
    return {name.removeprefix(f"{prefix}."): t for name, t in tensors.items() if name.startswith(f"{prefix}.")}


def warn_if_weights_vanish(method: Method, k: int) -> None:
    """Say so if, with one upload a round, a method steps by that upload however stale it is, as FedAvg does."""
    normalises = all(getattr(part, "normalise", True) for part in method.strategy.modules())
    if k == 1 and normalises and type(method.strategy) is not FedAvg and _steps_by_the_upload(method.strategy):
        warnings.warn(
            f"with k=1 {method.name} aggregates as FedAvg does: the weight of a single upload is normalised to one.",
            stacklevel=2,
        )


def _steps_by_the_upload(strategy: Strategy) -> bool:
    """Try a strategy on three single uploads that differ in direction, staleness and client."""
    deltas: NDArray[np.float64] = np.random.default_rng(0).standard_normal((3, 1, 4))
    try:
        probe = prepared(strategy, 3, 1, 4, torch.float64, torch.device("cpu"), seed=0)
        for i, delta in enumerate(torch.from_numpy(deltas)):
            staleness, client, size = (torch.tensor([each]) for each in ((1, 2, 50)[i], i, 10 * i + 1))
            moved = torch.from_numpy(deltas[2 - i])
            models: dict[str, Any] = {"model": moved[0], "received_from": partial(torch.mul, moved, 0.5)}
            if not torch.allclose(probe(Arrivals(delta, staleness, client, size, **models)), delta[0]):
                return False
    except Exception:  # a strategy of the user's own may need more than this
        return False
    return True
