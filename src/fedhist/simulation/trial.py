"""The description of a run: the only list of options, from which commands, files, checkpoints and reports take theirs.

Imports nothing heavy, since ``fedhist run --help`` is built from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from fedhist.clients.local import Local, as_local
from fedhist.errors import InvalidInput, number, positive, require, whole
from fedhist.options import documented, option, options_of, part, plain, values_of
from fedhist.simulation.server_options import ServerOptions

if TYPE_CHECKING:
    from fedhist.clients.objectives import Objective
    from fedhist.data.task import Task
    from fedhist.simulation.methods import Method
    from fedhist.store.history import History
    from fedhist.strategies import Strategy
    from fedhist.world.attacks import Attack
    from fedhist.world.availability import Availability
    from fedhist.world.closing import Closing
    from fedhist.world.coupling import Coupling
    from fedhist.world.faults import Faults
    from fedhist.world.fleet import Fleet
    from fedhist.world.network import Transfers
    from fedhist.world.schedule import Schedule
    from fedhist.world.speeds import Speeds

INSTEAD = (("epochs", "local_steps"), ("k", "closing"), ("schedule", "speeds"))
"""Options of which one takes the place of the other, so that who gives one does not inherit the other."""
ROUNDS = 300
"""Rounds of a run that nothing is said about."""
TASK = 'A task, or the name of a data set, which is then loaded as load_task(name, seed=seed) does: "digits".'
LOCAL = (
    "The clients' work, fedhist.Local(…), or a function that trains a module. By default Local() with the task's own "
    "learning rate, if it has one."
)
OBJECTIVE = "What clients minimise, such as fedhist.Proximal(). By default what the method says."


@documented
@dataclass(frozen=True, eq=False, kw_only=True)
class Trial(ServerOptions):
    """One run to be simulated: a method, on a task, with a seed.

    `strategy`, `task`, `local` and `objective` may be objects of one's own. Where another object is expected, such as
    :class:`Pareto` for `speeds`, a string such as "pareto:alpha=1" will do, as on the command line.
    """

    task: Task = dataclasses.field(kw_only=False, metadata={"help": TASK})
    rounds: int = option(None, "Rounds to run.", "Method", default_text=f"{ROUNDS}, or those up to `until`")
    until: float | None = option(
        None,
        "Virtual time at which to stop, if `rounds` are not over before; counted as if nothing were rejected.",
        "Method",
    )
    closing: Closing | None = option(
        None,
        "What closes a round, if not the first k uploads: synchronous:k=10,over_select=1.3 (sample clients and wait), "
        "deadline:seconds=5,at_least=3 (take what is there) or arrival (every upload).",
        "Method",
    )
    concurrency: int | None = option(None, "Clients at work at a time.", "Method", default_text="all")
    local: Local = part(Local, help=LOCAL)
    objective: Objective | None = dataclasses.field(default=None, metadata={"help": OBJECTIVE})
    speeds: Speeds = option(
        "lognormal",
        "How long clients take: constant, uniform, lognormal, exponential, pareto, explicit, random (K of N at random) "
        "or a profile (see `fedhist world --list`), with options as in lognormal:sigma=1.",
        "World",
    )
    network: Transfers | None = option(
        None, "Bits a second and seconds of delay between clients and server: up=5e6,down=20e6,latency=0.05.", "World"
    )
    availability: Availability | None = option(
        None,
        "When clients are there: always, day-night or trace:file=…, with options as in always:gives_up=0.1.",
        "World",
    )
    coupling: Coupling | None = option(
        None,
        "Which clients are slow: those with few examples (size), or with certain labels (labels:labels=[0]).",
        "World",
    )
    schedule: History | Schedule | None = option(
        None, "Recorded arrivals instead of speeds: a CSV or JSONL file with client, start and end.", "World"
    )
    schedule_clients: str = option(
        "auto", "What names a client there: ids, labels, or auto (whole numbers are ids).", "World"
    )
    faults: Faults | None = option(None, "How uploads break on their way: nan=0.01,huge=0.02,dropped=0.1.", "Faults")
    attack: Attack | None = option(
        None,
        "What some clients do: sign-flip, scaled-noise, same-value, little-is-enough or label-flip, with options as "
        "in sign-flip:share=0.2.",
        "Attack",
    )
    seed: int = option(0, "Seed of split, schedule, batches and initial model.", "Run", compared=False)
    eval_every: int = option(
        None,
        "Rounds between evaluations; the last round is always evaluated.",
        "Run",
        default_text="a twentieth of the rounds, at most 100",
        compared=False,
    )
    client_eval_every: int | None = option(
        None,
        "Rounds between evaluations on every client's own test data, where the task has them.",
        "Run",
        default_text="five evaluations, the last one among them",
        compared=False,
    )
    target: float | None = option(
        None,
        "Value of the primary metric that tables and reports count the rounds to.",
        "Run",
        default_text="0.5 for an accuracy",
        compared=False,
    )

    def __post_init__(self) -> None:
        from fedhist.data.datasets import as_task  # noqa: PLC0415
        from fedhist.world.attacks import as_attack  # noqa: PLC0415
        from fedhist.world.availability import as_availability  # noqa: PLC0415
        from fedhist.world.coupling import as_coupling  # noqa: PLC0415
        from fedhist.world.faults import as_faults  # noqa: PLC0415
        from fedhist.world.network import as_network  # noqa: PLC0415
        from fedhist.world.speeds import as_speeds  # noqa: PLC0415

        self._set(task=as_task(self.task, whole("seed", self.seed)))
        super().__post_init__()
        local = as_local(self.local, self.task.lr)
        rates = local.lr if isinstance(local.lr, tuple) else None
        clients = self.task.num_clients
        fits = rates is None or len(rates) == clients
        require(fits, f"lr names {len(rates or ())} rates for {clients} clients.")
        self._set(
            local=local,
            speeds=as_speeds(self.speeds),
            network=as_network(self.network),
            availability=as_availability(self.availability),
            coupling=as_coupling(self.coupling),
            faults=as_faults(self.faults),
            attack=as_attack(self.attack),
            target=self._target(),
        )
        self._set(rounds=self._rounds())
        every = min(100, max(1, self.rounds // 20)) if self.eval_every is None else self.eval_every
        self._set(eval_every=whole("eval_every", every, 1))
        self._set(client_eval_every=self._client_eval_every())
        self._check_sent()
        if self.attack is not None:
            self.attack.attackers(self.task.num_clients, self.seed)
        if self.schedule is not None:
            self._set(schedule=self._recorded())

    @classmethod
    def of(cls, strategy: Strategy | str | Method, task: Task | str, **options: Any) -> Self:
        """Return a trial whose local work may also be given one by one, as commands and files do: ``lr=0.1``."""
        from fedhist.data.datasets import as_task  # noqa: PLC0415

        task = as_task(task, whole("seed", options.get("seed", 0)))
        known = options_of(cast(Hashable, cls))
        own = {name: value for name, value in options.items() if name not in known or known[name].part is None}
        given = {known[name].field: value for name, value in options.items() if name not in own}
        if given:
            local = as_local(own.get("local"), task.lr)
            if given.get("epochs") is None and given.get("steps") is not None:
                given["epochs"] = None
            own["local"] = dataclasses.replace(local, **given)
        return cls(strategy, task, **own)

    def _target(self) -> float | None:
        """Return the value of the primary metric that rounds are counted to."""
        from fedhist.store.measure import Measure  # noqa: PLC0415

        share = Measure(self.task.primary, True).share
        if self.target is None:
            return 0.5 if share else None
        return number("target", self.target, 0, 1) if share else number("target", self.target)

    def _uploads(self) -> int:
        """Settle how rounds close; return how many uploads they have at most."""
        from fedhist.world.clocks import busy_clients  # noqa: PLC0415
        from fedhist.world.closing import FirstK, as_closing  # noqa: PLC0415

        closing = as_closing(self.closing, self.k)
        if self.schedule is not None:
            fits = isinstance(closing, FirstK)
            require(fits, "a recorded schedule says who arrives when; only the first k uploads can close a round.")
        most = closing.most(busy_clients(self.task.num_clients, closing, self.concurrency))
        require(self.k in (None, most), f"k={self.k} and closing={closing} say two things; give one of them.")
        self._set(closing=None if type(closing) is FirstK else closing)
        return most

    @property
    def rule(self) -> Closing:
        """What closes a round: :attr:`closing`, or the first K uploads."""
        from fedhist.world.closing import FirstK  # noqa: PLC0415

        return self.closing or FirstK(self.k)

    def _rounds(self) -> int:
        """Return how many rounds there are, by number or by time."""
        from fedhist.world.clocks import rounds_until  # noqa: PLC0415

        if self.rounds is not None:
            whole("rounds", self.rounds, 1)
        if self.until is None:
            return ROUNDS if self.rounds is None else self.rounds
        positive("until", self.until)
        require(self.schedule is None, "until is for simulated speeds; give rounds with a recorded schedule.")
        return rounds_until(self.fleet(), self.rule, self.until, self.concurrency, self.rounds)

    def fleet(self) -> Fleet:
        """Return the clients as the clock knows them: how long each takes, and when it is there."""
        from fedhist.world.fleet import Fleet  # noqa: PLC0415

        task = self.task
        return Fleet.of(
            task.num_clients,
            self.speeds,
            self.seed,
            examples=self.local.examples(task.sizes),
            network=self.network,
            traffic=self.traffic,
            availability=self.availability,
            coupling=self.coupling,
            task=task,
        )

    def _client_eval_every(self) -> int | None:
        """Return the rounds between evaluations on clients' own data, which are rounds with an evaluation."""
        if self.task.client_test is None:
            require(self.client_eval_every is None, "client_eval_every needs a task with client_test.")
            return None
        if self.client_eval_every is None:
            return self.eval_every * -(-self.rounds // (5 * self.eval_every))
        every = whole("client_eval_every", self.client_eval_every, 1)
        fits = every % self.eval_every == 0
        require(fits, f"client_eval_every={every} must be a multiple of eval_every={self.eval_every}.")
        return every

    def _check_sent(self) -> None:
        """Raise if clients would send more than privacy or a recording covers."""
        from fedhist.clients.objectives import uses_mail  # noqa: PLC0415

        mail, private = uses_mail(self.method.objective), self.method.strategy.bounds_uploads
        fits = not private or not self.task.layout.statistics
        require(fits, "Private protects parameters, not running statistics; use fedhist.to_group_norm(model).")
        require(not private or not mail, f"Private does not protect what clients of {self.method.name} send along.")
        alone = self.local.single(self.task.sizes.tolist())
        if alone is not None and self.task.layout.statistics and self.task.needs_two:
            raise InvalidInput(
                f"client {alone} has a minibatch of a single example, which batch normalisation cannot use; choose "
                "another batch_size, or fedhist.to_group_norm(model)."
            )
        from fedhist.clients.objectives import TaskLoss  # noqa: PLC0415

        fits = self.local.loop is None or type(self.method.objective) is TaskLoss
        require(fits, f"a training loop of its own leaves out what clients of {self.method.name} do; write it into it.")
        rule = self.rule
        full = rule.enough is not None and rule.seconds is None and rule.sample is None
        require(self.record is None or full, f"record needs K uploads in every round, which {rule} does not promise.")
        kept = self.record is None or not mail
        require(kept, f"record does not keep what clients of {self.method.name} send along.")

    def _recorded(self) -> Schedule:
        """Return the recorded arrivals that drive this run."""
        from fedhist.store.history import History  # noqa: PLC0415
        from fedhist.world.arrival_log import read_schedule  # noqa: PLC0415
        from fedhist.world.schedule import Schedule, recorded_schedule  # noqa: PLC0415

        given: Any = self.schedule
        for name in ("concurrency", "network", "availability", "coupling"):
            require(getattr(self, name) is None, f"{name} cannot be chosen for a recorded schedule.")
        require(self.faults is None, "faults would change who arrives, which a recorded schedule fixes.")
        if isinstance(given, (str, Path)):
            given = read_schedule(given, self.k, clients=self.schedule_clients)
        fits = isinstance(given, (History, Schedule))
        require(fits, f"schedule must be a fedhist.History or a file, got {type(given).__name__}.")
        return recorded_schedule(given, self.task.num_clients, self.k, self.rounds)

    def described(self) -> dict[str, Any]:
        """Return all options of this run and facts about its task as plain values: two runs that differ do so here."""
        from fedhist.store.arrays import checksum  # noqa: PLC0415

        task, layout = self.task, self.task.layout
        options = values_of(self)
        if self.schedule is not None:
            arrivals = self.schedule
            options["schedule"] = checksum(arrivals.clients, arrivals.staleness, arrivals.arrived)
            for name in ("speeds", "network", "availability", "coupling"):
                del options[name]
        return {
            **{name: plain(value) for name, value in task.about.items()},
            "clients": task.num_clients,
            **options,
            "objective": plain(self.method.objective),
            "loss": task.loss_name,
            **({} if self.local.loop is None else {"loop": plain(self.local.loop)}),
            "parameters": layout.size,
            "bytes_per_upload": self.traffic[0],
            "bytes_per_download": self.traffic[1],
            "data": task.checksum,
        }

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes that a client sends and is sent: parameters, statistics, and what goes along with them."""
        from fedhist.clients.objectives import uses_mail  # noqa: PLC0415
        from fedhist.clients.parcel import parcel_of  # noqa: PLC0415

        layout = self.task.layout
        up = layout.width + (layout.size if uses_mail(self.method.objective) else 0)
        down = parcel_of(layout, self.method.objective).version_width
        return up * layout.dtype.itemsize, down * layout.dtype.itemsize

    def __repr__(self) -> str:
        known = {name: each.default for name, each in options_of(Trial).items() if name != "seed"}
        given = {name: value for name, value in values_of(self).items() if name in known and value != known[name]}
        options = ", ".join(f"{name}={value}" for name, value in given.items())
        return f"<Trial of {self.method.name} on {self.task.name}, seed {self.seed}: {options}>"

    def __str__(self) -> str:
        attack = "" if self.attack is None else f", {self.attack}"
        return f"{self.method.name}, seed {self.seed}{attack}"


NOT_COMPARED = frozenset(name for name, each in options_of(Trial).items() if not each.compared) | {
    "data",
    "objective",
    "bytes_per_upload",
    "bytes_per_download",
}
"""Settings in which runs may differ and still be compared: those without effect on the result, seed, and method."""
