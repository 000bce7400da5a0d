"""What one run is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fedhist.clients import LocalSGD
from fedhist.clients.objectives import Objective
from fedhist.data.task import Task
from fedhist.errors import InvalidInput, rate, require, whole
from fedhist.simulation.methods import Method, as_method
from fedhist.store.history import History
from fedhist.store.recording import About, check_dtype
from fedhist.strategies import Strategy
from fedhist.strategies.screening import MAX_NORM_RATIO, Screen
from fedhist.world.attacks import Attack, as_attack
from fedhist.world.clock import Schedule, recorded_schedule
from fedhist.world.faults import Faults
from fedhist.world.speeds import Devices, LogNormal


def sameness(thing: object) -> object:
    """Return what tells things apart: their value where they can be hashed, else which object it is."""
    try:
        hash(thing)
    except TypeError:
        return id(thing)
    return thing


@dataclass(frozen=True, eq=False)
class Trial:
    """One run to be simulated: a method, on a task, with a seed.

    Parameters
    ----------
    strategy
        A strategy, or a method's name such as "fedhist" or "moon". The object is copied, not changed.
    task
        Model, data and clients.
    k
        Uploads that close a round, from 1 (fully asynchronous) to N (synchronous).
    rounds
        Rounds to run.
    local
        The clients' work; ``LocalSGD()`` by default.
    devices
        How long clients take; ``LogNormal()`` by default.
    seed
        Seed of the schedule, the batches and, where `task.model` is a function, the initial weights.
    objective
        What clients minimise, if not what the method says.
    server_lr
        `η` in Eq. 4.
    concurrency
        Clients at work at a time; all by default.
    eval_every
        Rounds between evaluations; the last round is always evaluated.
    schedule
        Arrivals that were recorded, as the history of a deployment or of another run, instead of `devices`.
    faults
        How uploads break on their way, to see what becomes of a run then.
    bad_updates
        What to do with an upload that is no number, is absurdly long or is not what was asked for: "reject" it,
        "clip" it if only its length is wrong, or "stop".
    max_norm_ratio
        How many times as long as usual an upload may be; up to ten times the model's length it always may.
    record
        A folder in which to keep all uploads, for :func:`fedhist.replay`, and the history.
    record_dtype
        "float16" or "bfloat16" to keep them in half the size; by default as they are.
    attack
        What some of the clients do, such as ``SignFlip(share=0.2)`` or "sign-flip:share=0.2"; by default nobody does.
    """

    strategy: Strategy | str | Method
    task: Task
    k: int = field(kw_only=True)
    rounds: int = field(kw_only=True)
    local: LocalSGD = field(default_factory=LocalSGD, kw_only=True)
    devices: Devices = field(default_factory=LogNormal, kw_only=True)
    seed: int = field(default=0, kw_only=True)
    objective: Objective | None = field(default=None, kw_only=True)
    server_lr: float = field(default=1.0, kw_only=True)
    concurrency: int | None = field(default=None, kw_only=True)
    eval_every: int = field(default=100, kw_only=True)
    schedule: History | Schedule | None = field(default=None, kw_only=True)
    faults: Faults | None = field(default=None, kw_only=True)
    bad_updates: str = field(default="reject", kw_only=True)
    max_norm_ratio: float = field(default=MAX_NORM_RATIO, kw_only=True)
    record: str | Path | None = field(default=None, kw_only=True)
    record_dtype: str | None = field(default=None, kw_only=True)
    attack: Attack | str | None = field(default=None, kw_only=True)

    method: Method = field(init=False, repr=False)
    adversary: Attack | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.task, Task):
            raise InvalidInput(f"task must be a fedhist.Task, got {type(self.task).__name__}.")
        require(isinstance(self.local, LocalSGD), f"local must be a fedhist.LocalSGD, got {self.local!r}.")
        whole("k", self.k, 1)
        whole("rounds", self.rounds, 1)
        whole("seed", self.seed)
        whole("eval_every", self.eval_every, 1)
        rate("server_lr", self.server_lr)
        Screen(self.bad_updates, self.max_norm_ratio)
        require(
            self.faults is None or isinstance(self.faults, Faults),
            f"faults must be a fedhist.Faults, got {type(self.faults).__name__}.",
        )
        if self.schedule is not None:
            require(
                isinstance(self.schedule, (History, Schedule)),
                f"schedule must be a fedhist.History, got {type(self.schedule).__name__}.",
            )
            require(self.concurrency is None, "concurrency cannot be chosen for a recorded schedule.")
            require(self.faults is None, "faults would change who arrives, which a recorded schedule fixes.")
            recorded_schedule(self.schedule, self.task.num_clients, self.k, self.rounds)
        check_dtype(self.record_dtype)
        object.__setattr__(self, "method", as_method(self.strategy, self.objective))
        object.__setattr__(self, "adversary", as_attack(self.attack))
        if self.adversary is not None:
            self.adversary.attackers(self.task.num_clients, self.seed)

    @property
    def recorded(self) -> About:
        """What a recording of this trial is of."""
        layout = self.task.layout
        model_dtype = str(layout.dtype).removeprefix("torch.")
        return About(
            rounds=self.rounds,
            k=self.k,
            num_params=layout.size,
            num_clients=self.task.num_clients,
            dtype=self.record_dtype or model_dtype,
            model_dtype=model_dtype,
            server_lr=float(self.server_lr),
            method=self.method.name,
            seed=int(self.seed),
        )

    def __str__(self) -> str:
        attack = "" if self.adversary is None else f", {self.adversary}"
        return f"{self.method.name}, seed {self.seed}{attack}"
