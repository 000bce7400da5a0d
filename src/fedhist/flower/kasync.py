"""Any fedhist strategy as a Flower strategy."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from logging import INFO
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MessageType, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from torch import Tensor

from fedhist.errors import FedHistError, number, positive, reason, require, whole
from fedhist.flower.evaluation import EvaluateFn, Evaluations
from fedhist.flower.exchange import Exchange
from fedhist.flower.metrics import averaged
from fedhist.flower.source import Clock, Network, NetworkOptions
from fedhist.flower.wire import Wire, decode
from fedhist.simulation.server import Server
from fedhist.simulation.trial import ServerOptions
from fedhist.store import snapshot
from fedhist.store.history import ROWS, History
from fedhist.store.recording import About, Tape, check_room
from fedhist.strategies import FedHist, Private
from fedhist.strategies.fedhist import default_h
from fedhist.strategies.screening import Rejected

CHECKPOINT, CHECKPOINT_KIND = "kasync.safetensors", "a checkpoint of a K-async server, 3"
ROOM = 1000
"""Clients there is room for, where nobody has said how many there are."""
METRICS = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")


class _Monotonic:
    """A clock that nobody sets."""

    def time(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float, /) -> None:
        time.sleep(seconds)


@dataclass(frozen=True, eq=False, kw_only=True)
class KAsync(ServerOptions, NetworkOptions):
    """Any fedhist strategy as a Flower strategy: exactly K uploads close a round, and nobody waits for the others.

    The model goes to every node once. The first K uploads make a new one, which goes to those K nodes while the
    others work on; an upload's staleness counts from the version its node was sent. Nodes may come, go, fail and
    send nonsense: what is not a well-formed, finite model of a plausible length never reaches the strategy, and
    every such event is in :attr:`history`.

    Options not listed here are those of :class:`fedhist.simulation.trial.ServerOptions` (`strategy`, `k`, `server_lr`,
    `bad_updates`, `max_norm_ratio`, `record`, `record_dtype`) and of :class:`fedhist.flower.source.NetworkOptions`
    (`message_ttl`, `poll_interval`, `refresh_interval`, `max_round_wait`, `packed`, `evaluate_every`,
    `fraction_evaluate`).

    Parameters
    ----------
    num_clients
        How many different clients may take part. FedHist derives from it how many rounds it remembers. Without it,
        those connected at the start are counted for that, and there is room for more.
    min_available_nodes
        Nodes to wait for before the start; `k` by default.
    trainable
        Names of the entries the strategy works on, or a function of a name. By default all floating-point
        entries but running statistics. The others are averaged by examples.
    checkpoint
        A folder in which to save the server while it is under way; if it holds a run, that is resumed.
    checkpoint_every
        Seconds between checkpoints; 0, the default, saves after every round.
    on_round
        Called after every round with its number and the history so far in a list, as in a simulation.
    """

    k: int = dataclasses.field(default=10, kw_only=False)
    num_clients: int | None = None
    min_available_nodes: int | None = None
    trainable: Iterable[str] | Callable[[str], bool] | None = None
    checkpoint: str | Path | None = None
    checkpoint_every: float = 0.0
    on_round: Callable[[int, Sequence[History]], None] | None = None
    clock: Clock = dataclasses.field(default_factory=_Monotonic)

    session: Session = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check()
        require(
            self.num_clients is None or whole("num_clients", self.num_clients, 1) >= self.k,
            f"k={self.k} uploads a round need at least as many clients, got num_clients={self.num_clients}.",
        )
        if self.min_available_nodes is not None:
            whole("min_available_nodes", self.min_available_nodes, 1)
        number("checkpoint_every", self.checkpoint_every, 0)
        private = any(isinstance(part, Private) for part in self.method.strategy.modules())
        require(
            self.checkpoint is None or self.checkpoint_every == 0 or not private,
            f"checkpoint_every={self.checkpoint_every} would let a restart forget uploads whose privacy is spent; "
            "use 0.",
        )
        require(
            self.on_round is None or callable(self.on_round), f"on_round must be a function, got {self.on_round!r}."
        )

    @property
    def history(self) -> History:
        """What happened so far, in the form a simulation has."""
        if not hasattr(self, "session"):
            raise FedHistError("there is no history before start().")
        return self.session.history()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run the rounds. Arguments and result are those of Flower's strategies.

        `timeout` is for how many seconds a single node may be silent before it is given up and sent work anew; it
        must be longer than the slowest client works. A node that was given up is waited for twice as long.
        `evaluate_fn` works in a thread of its own, before the first round and after each, while rounds go on.
        """
        whole("num_rounds", num_rounds, 1)
        positive("timeout", timeout)
        configs = {
            MessageType.TRAIN: train_config or ConfigRecord(),
            MessageType.EVALUATE: evaluate_config or ConfigRecord(),
        }
        self._set(session=Session(self, grid, initial_arrays, num_rounds, timeout, configs, evaluate_fn))
        return self.session.run()


class Session:
    """One call of :meth:`KAsync.start`."""

    def __init__(
        self,
        options: KAsync,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int,
        timeout: float,
        configs: dict[str, ConfigRecord],
        evaluate_fn: EvaluateFn | None,
    ) -> None:
        self.options, self.grid, self.num_rounds, self.timeout = options, grid, num_rounds, timeout
        self.configs, self.evaluate_fn = configs, evaluate_fn
        try:
            state = {name: decode(array) for name, array in initial_arrays.items()}
            self.wire = Wire(state, options.trainable)
            self.first, self.rest = self.wire.split(state)
        except Rejected as error:
            raise FedHistError(f"initial_arrays cannot be used: {error}.") from None
        self.result = Result(arrays=initial_arrays)
        self.server: Server
        self.source: Network
        self._saved = -np.inf

    def run(self) -> Result:
        """Take the server to the end of its rounds."""
        name, options = self.options.method.name, self.options
        log(INFO, "%s, K-async: %d rounds of %d uploads", name, self.num_rounds, options.k)
        saved = self._read()
        self._set_up(saved)
        try:
            for round_ in range(self.server.round + 1, self.num_rounds + 1):
                for server, arrivals in self.source.next():
                    server.close(arrivals)
                self._after(round_)
            self.source.finish()
            self.result.arrays = self._model()
            self._save()
        finally:
            self.source.close()
            if self.server.tape is not None:
                self.server.tape.close()
        if self.server.tape is not None:
            self.history().save(self.server.tape.folder)
        self.source.log_events()
        events = len(self.server.history.events)
        log(INFO, "%s: %d rounds in %.1f s, %d events", name, self.num_rounds, self.source.now, events)
        return self.result

    def _after(self, round_: int) -> None:
        """Do what follows a round."""
        if self.server.diverged is not None:
            raise self.server.diverged
        taken, options, now = self.source.taken, self.options, self.source.now
        metrics = [(arrival.upload.num_examples, arrival.upload.metrics) for arrival in taken]
        self.result.train_metrics_clientapp[round_] = averaged(metrics, options.weighted_by_key)
        who = ", ".join(f"{arrival.client} (τ {round_ - arrival.version + 1})" for arrival in taken)
        log(INFO, "round %d closed at %.1f s with clients %s", round_, now, who)
        self.source.evaluations.take_in(self.source.books.note, now)
        if self.server.tape is not None:
            self.server.tape.after(round_)
        if round_ == self.num_rounds or now - self._saved >= options.checkpoint_every:
            self._save()
        self.source.evaluations.on_server(round_, self._model())
        self.server.trace(round_)
        if options.evaluate_every and round_ % options.evaluate_every == 0:
            self.source.to_evaluate = round_
        if options.on_round is not None:
            options.on_round(round_, [self.history()])

    def _model(self) -> ArrayRecord:
        return self.wire.record(self.server.model, self.source.rest)

    def _set_up(self, saved: tuple[dict[str, Tensor], dict[str, Any]] | None) -> None:
        """Prepare the server and the network, as they were saved or for the nodes that are connected."""
        expected = self._expected_clients() if saved is None else int(saved[1]["expected"])
        self.expected = expected
        options, room = self.options, self.options.num_clients or max(ROOM, 10 * expected)
        strategy = deepcopy(options.method.strategy)
        for part in strategy.modules():  # it may be inside another one
            if isinstance(part, FedHist) and part.h is None:
                part.h = default_h(expected, options.k)  # room for more must not lengthen its memory
        shared = {each.name: getattr(options, each.name) for each in dataclasses.fields(ServerOptions) if each.init}
        told = ServerOptions(**shared | {"strategy": dataclasses.replace(options.method, strategy=strategy)})
        rounds = self.num_rounds if saved is None else max(self.num_rounds, int(saved[1]["server"]["round"]))
        self.server = Server(told, self.first, room, rounds, self._empty_history(), tape=self._tape(room))
        evaluations = Evaluations(self.server, self.result, self.evaluate_fn, self.timeout, options.weighted_by_key)
        books = Exchange(self.server.screen, self.server.note, options.k, room, self.timeout, options.max_round_wait)
        self.source = Network(
            options, self.grid, options.clock, self.server, books, evaluations, self.wire, self.rest, self.configs
        )
        if saved is None:
            self.source.begin()
        else:
            self._restore(*saved)
        if self.server.tape is not None:
            self.server.tape.begin(self.server.round)
        if self.server.round not in self.result.evaluate_metrics_serverapp:
            evaluations.on_server(self.server.round, self._model())

    def _expected_clients(self) -> int:
        """Wait for enough nodes; return how many clients there will be."""
        options = self.options
        wanted, logged = options.min_available_nodes or options.k, False
        while len(nodes := list(self.grid.get_node_ids())) < wanted:
            if not logged:
                log(INFO, "waiting for %d nodes, %d are connected", wanted, len(nodes))
                logged = True
            options.clock.sleep(options.refresh_interval)
        return options.num_clients or max(len(nodes), options.k)

    def _empty_history(self) -> History:
        rows: list[Any] = [np.zeros((0, self.options.k), kind) for kind in ROWS.values()]
        return History(self.options.method.name, 0, "Flower", *rows)

    def _tape(self, room: int) -> Tape | None:
        """Return what records the uploads, if that is asked for."""
        options = self.options
        if options.record is None:
            return None
        require(options.max_round_wait is None, "record cannot keep rounds with fewer than K uploads; set no deadline.")
        dtype = str(self.wire.dtype).removeprefix("torch.")
        about = About(
            rounds=self.num_rounds,
            k=options.k,
            num_params=self.wire.num_params,
            num_clients=room,
            dtype=options.record_dtype or dtype,
            model_dtype=dtype,
            server_lr=float(options.server_lr),
            method=options.method.name,
            seed=0,
        )
        check_room({options.record: about}, resumed=options.checkpoint is not None)
        return Tape(options.record, about, self.first)

    def history(self) -> History:
        """Return the rounds so far."""
        history, clients = self.server.history, len(self.source.books.clients.numbers)
        entries = self.wire.shapes.values()
        history.task, history.wall_seconds = f"Flower, {clients} clients", self.source.now
        history.model = self._model().to_torch_state_dict()
        history.setting = {
            "clients": clients,
            "k": self.options.k,
            "server_lr": self.options.server_lr,
            "parameters": self.wire.num_params,
            "bytes_per_upload": sum(int(np.prod(shape)) * np.dtype(kind).itemsize for kind, shape in entries),
        }
        return history

    def _described(self) -> dict[str, Any]:
        """Return what must be the same when a run is resumed."""
        return {
            "method": self.options.method.name,
            "k": self.options.k,
            "num_clients": self.options.num_clients,
            "server_lr": self.options.server_lr,
            "entries": [[name, kind, list(shape)] for name, (kind, shape) in self.wire.shapes.items()],
            "trained": self.wire.trained,
        }

    def _read(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return the run in the checkpoint's folder, if there is one."""
        if self.options.checkpoint is None:
            return None
        folder = Path(self.options.checkpoint)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FedHistError(f"checkpoint={folder} cannot be written: {error.strerror}.") from error
        if not (folder / CHECKPOINT).exists():
            return None
        tensors, state = snapshot.read(folder / CHECKPOINT, CHECKPOINT_KIND)
        for name, value in self._described().items():
            if state.get(name) != value:
                raise FedHistError(
                    f"{folder} holds a run with {name}={state.get(name)!r}, this one has {value!r}; use another folder."
                )
        return tensors, state

    def _restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        try:
            self.server.restore(tensors, state["server"])
            self.source.restore([tensors])
            self.source.books.clients.numbers = state["clients"]
            for metrics in METRICS:
                setattr(self.result, metrics, {int(r): MetricRecord(values) for r, values in state[metrics].items()})
            self.source.begin(float(state["elapsed"]))
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise FedHistError(
                f"{self.options.checkpoint} holds a run that cannot be resumed: {reason(error)}."
            ) from error
        self.result.arrays = self._model()
        log(INFO, "resumed in round %d from %s", self.server.round + 1, self.options.checkpoint)
        self.source.books.note(self.source.now, "resumed")

    def _save(self) -> None:
        if self.options.checkpoint is None:
            return
        if self.server.tape is not None:
            self.server.tape.write(self.server.round, flush=True)  # a checkpoint is never ahead of the recording
        tensors, told = self.server.state()
        state = self._described() | {
            "expected": self.expected,
            "server": told,
            "elapsed": self.source.now,
            "clients": self.source.books.clients.numbers,
        }
        for metrics in METRICS:
            state[metrics] = {str(r): dict(values) for r, values in getattr(self.result, metrics).items()}
        file = Path(self.options.checkpoint) / CHECKPOINT
        try:
            snapshot.write(file, CHECKPOINT_KIND, {**tensors, **self.source.state()[0]}, state)
            self._saved = self.source.now
        except OSError as error:  # weeks of work must not end because a disk is full for a while
            why = f"{file} cannot be written: {error.strerror or error}"
            self.source.books.note(self.source.now, "not saved", reason=why)
