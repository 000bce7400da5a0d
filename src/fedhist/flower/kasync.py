"""Any fedhist strategy as a Flower strategy."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import secrets
from collections.abc import Mapping
from copy import deepcopy
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, MessageType, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from torch import Tensor

from fedhist.clients.objectives import uses_mail
from fedhist.errors import FedHistError, InvalidInput, flag, number, positive, reason, require, whole
from fedhist.flower.accounts import Accounts
from fedhist.flower.evaluation import EvaluateFn, Evaluations
from fedhist.flower.exchange import Exchange
from fedhist.flower.log import dated, log_end, log_round
from fedhist.flower.mail import check_clients_half, config_of
from fedhist.flower.metrics import checked
from fedhist.flower.replies import averaged
from fedhist.flower.source import Network, NetworkOptions
from fedhist.flower.wire import Trainable, Wire, as_record, decode
from fedhist.options import option, options_of, values_of
from fedhist.simulation.checkpoint import NOT_DESCRIBED, claimed
from fedhist.simulation.hooks import Hooks, OnRound, listed, watching
from fedhist.simulation.server import Server, about_recording
from fedhist.simulation.trial import ServerOptions
from fedhist.store import snapshot
from fedhist.store.history import History
from fedhist.store.recording import Tape, check_room
from fedhist.strategies import FedHist, Private, Strategy
from fedhist.strategies.rules.fedhist import default_h
from fedhist.strategies.screening import Rejected, Screen

CHECKPOINT, CHECKPOINT_KIND = "kasync.safetensors", "a checkpoint of a K-async server, 5"
MOST = 10**9
"""Clients and rounds of a run, at most; tables of that length are made when one is resumed."""
ROOM = 1000
"""Clients there is room for, at least, where `num_clients` is not given."""
METRICS = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")
"""The parts of Flower's result that a checkpoint keeps."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class KAsync(ServerOptions, NetworkOptions):
    """Any fedhist strategy as a Flower strategy: exactly K uploads close a round, without waiting for the others.

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
    authenticated
        Whether the SuperLink admits nodes with registered keys only, so that a node's id proves who it is. It matters
        to :class:`fedhist.Private`, which accounts for the privacy spent. Without it, a node that comes may be any
        client whose node is gone: it waits for a minute and a half, and its account starts at the largest of theirs.
    min_available_nodes
        Nodes to wait for before the start; `k` by default.
    trainable
        Names of the entries the strategy works on, or a function of a name. By default all floating-point
        entries but running statistics. The others are averaged by examples.
    checkpoint
        A folder in which to save the server while it is under way; if it holds a run, that is resumed. Where privacy is
        counted, a server that cannot save a round stops before it sends the new model to anybody.
    checkpoint_every
        Seconds between checkpoints; 0, the default, saves after every round.
    metrics
        Whether more is better, for each metric of `evaluate_fn` that the history keeps, the most important one first:
        ``{"auc": True, "rmse": False}``. By default all numbers it returns: accuracy first, else the loss, and less is
        better for what is called loss, perplexity, mae, mse or rmse.
    on_round
        A function, or a list of functions, called after every round with its number and the history so far in a list,
        as in a simulation. One that has a method `close` is closed when the run ends, however it ends.
    """

    k: int = dataclasses.field(default=10, kw_only=False, metadata=ServerOptions.__dataclass_fields__["k"].metadata)
    num_clients: int | None = option(None, "How many different clients may take part.", "Method")
    authenticated: bool = option(False, "Only nodes with registered keys are admitted.", "Network")
    min_available_nodes: int | None = None
    trainable: Trainable = None
    checkpoint: str | Path | None = None
    checkpoint_every: float = 0.0
    metrics: Mapping[str, bool] | None = None
    on_round: Hooks | None = None

    session: Session = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.bad_updates != "accept", "bad_updates='accept' is for simulations; a network may send anything.")
        k, clients, nodes, every = self.k, self.num_clients, self.min_available_nodes, self.checkpoint_every
        wait = self.max_round_wait
        for name in ("poll_interval", "refresh_interval", "message_ttl"):
            if (value := getattr(self, name)) is not None:
                positive(name, value)
        if wait is not None:
            number("max_round_wait", wait, 0)
        whole("evaluate_every", self.evaluate_every, 0)
        number("fraction_evaluate", self.fraction_evaluate, 0, 1)
        fits = clients is None or whole("num_clients", clients, 1) >= k
        require(fits, f"k={k} uploads a round need at least as many clients, got num_clients={clients}.")
        whole("min_available_nodes", k if nodes is None else nodes, 1)
        flag("authenticated", self.authenticated)
        fits = (
            number("checkpoint_every", every, 0) == 0 or self.checkpoint is None or not privates(self.method.strategy)
        )
        require(fits, f"checkpoint_every={every} would let a restart forget uploads whose privacy is spent; use 0.")
        fits = self.record is None or wait is None
        require(fits, f"record needs K uploads in every round, so max_round_wait must be None, got {wait}.")
        self._set(metrics=checked(self.metrics))
        check_clients_half(self.method, clients, recorded=self.record is not None)
        listed(self.on_round)

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

        `timeout` is how many seconds a single node may be silent before it counts as failed and is sent work again; it
        must be longer than the slowest client works. A node that failed so gets twice the timeout.
        `evaluate_fn` works in a thread of its own, before the first round and after each, beside the rounds.
        """
        whole("num_rounds", num_rounds, 1)
        positive("timeout", timeout)
        train = ConfigRecord({**(train_config or {}), **config_of(self.method)})
        configs = {MessageType.TRAIN: train, MessageType.EVALUATE: evaluate_config}
        with contextlib.ExitStack() as stack:
            on_round = stack.enter_context(watching(self.on_round))
            if self.checkpoint is not None:  # two servers that resume one run would each count half of what it spends
                stack.enter_context(claimed(Path(self.checkpoint), CHECKPOINT))
            self._set(session=Session(self, grid, initial_arrays, num_rounds, timeout, configs, evaluate_fn, on_round))
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
        configs: dict[str, ConfigRecord | None],
        evaluate_fn: EvaluateFn | None,
        on_round: OnRound | None,
    ) -> None:
        self.options, self.num_rounds, self.on_round = options, num_rounds, on_round
        self._saved, self._saved_round = -math.inf, 0
        try:
            state = {name: decode(array) for name, array in initial_arrays.items()}
            self.wire = Wire(state, options.trainable)
            model, rest = self.wire.split(state)
        except Rejected as error:
            raise FedHistError(f"initial_arrays cannot be used: {error}.") from None
        saved = self._read()
        self.expected = self._wait_for_nodes(grid) if saved is None else int(saved[1]["expected"])
        room = options.num_clients or max(ROOM, 10 * self.expected)
        rounds = num_rounds if saved is None else max(num_rounds, int(saved[1]["server"]["round"]))
        strategy = deepcopy(options.method.strategy)
        for part in strategy.modules():  # it may be inside another one
            if isinstance(part, FedHist) and part.h is None and options.num_clients is None:
                part.h = default_h(self.expected, options.k)  # room for more clients must not lengthen its memory
        own = dataclasses.replace(options, strategy=strategy)
        history = History.begun(options.method.name, 0, "Flower", options.k)
        tape = self._tape(own, model, room, resumed=saved is not None)
        server = self.server = Server(own, model, room, rounds, history, tape=tape, name=options.method.name)
        self.result = Result(arrays=initial_arrays)
        counting = privates(server.strategy)
        accounts = Accounts(counting, room, authenticated=options.authenticated) if counting else None
        if counting and options.checkpoint is None:
            log(WARNING, "without a checkpoint, a server that is started again counts the privacy spent from zero")
        of_mail = None
        if uses_mail(options.method.objective):
            of_mail = Screen(options.bad_updates, options.max_norm_ratio, server.screen.model, room)
        wait = options.max_round_wait
        exchange = Exchange(server.screen, dated(server.note), options.k, room, timeout, wait, accounts, of_mail)
        key, metrics = options.weighted_by_key, options.metrics
        evaluations = Evaluations(server, self.result, exchange.note, evaluate_fn, timeout, key, metrics)
        history.id = run = secrets.token_hex(8) if saved is None else saved[1]["run"]
        self.source = Network(options, grid, server, exchange, evaluations, self.wire, rest, configs, run)
        if saved is None:
            self.source.begin()
        else:
            self._restore(*saved)

    def _wait_for_nodes(self, grid: Grid) -> int:
        """Wait until there are enough nodes; return how many clients to expect."""
        options, wanted = self.options, self.options.min_available_nodes or self.options.k
        log(INFO, "waiting for %d nodes", wanted)
        while (connected := len(options.patiently(grid.get_node_ids))) < wanted:
            options.clock.sleep(options.refresh_interval)
        return options.num_clients or max(connected, options.k)

    def _tape(self, options: KAsync, model: Tensor, room: int, *, resumed: bool) -> Tape | None:
        """Return what records the uploads, if they are to be recorded."""
        if options.record is None:
            return None
        about = about_recording(options, self.num_rounds, self.wire.num_params, room, self.wire.dtype)
        if not resumed:
            check_room({options.record: about}, resumable=options.checkpoint is not None)
        return Tape(options.record, about, model)

    def run(self) -> Result:
        """Take the server to the end of its rounds."""
        name, server, source = self.options.method.name, self.server, self.source
        log(INFO, "%s, K-async: %d rounds of %d uploads", name, self.num_rounds, self.options.k)
        with contextlib.ExitStack() as stack:
            stack.callback(source.close)
            if server.tape is not None:
                stack.callback(server.tape.close)
                server.tape.begin(server.round)
            if server.round not in self.result.evaluate_metrics_serverapp:
                source.evaluations.on_server(server.round, source.shown)
            left = range(server.round + 1, self.num_rounds + 1)
            for round_ in left:
                for each, arrivals in source.next():
                    with torch.no_grad():
                        each.close(arrivals)  # Eq. 4
                self._after(round_)
            source.finish()
            if not left and self.on_round is not None:  # which may not have seen the last evaluation
                self.on_round(server.round, [self.history()])
            self.result.arrays = as_record(source.shown)
            self._save()
        if server.tape is not None:
            self.history().save(server.tape.folder)
        log_end(server.history, source.now, self.result)
        return self.result

    def _after(self, round_: int) -> None:
        """Do what follows a round."""
        options, server, source, last = self.options, self.server, self.source, round_ == self.num_rounds
        if server.diverged is not None:
            server.diverged.histories = [self.history()]
            raise server.diverged
        metrics = [(arrival.upload.num_examples, arrival.upload.metrics) for arrival in source.taken]
        self.result.train_metrics_clientapp[round_] = averaged(metrics, options.weighted_by_key)
        staleness = {arrival.client: round_ - arrival.version + 1 for arrival in source.taken}
        log_round(round_, self.num_rounds, source.now, staleness, self.result.train_metrics_clientapp[round_])
        source.evaluations.take_in(source.now)
        server.trace(round_)
        if server.tape is not None:
            server.tape.write(round_, flush=True)  # a checkpoint is never ahead of the recording
        if last or source.now - self._saved >= options.checkpoint_every:
            self._save()
        source.evaluations.on_server(round_, source.shown)
        if options.evaluate_every and (last or round_ % options.evaluate_every == 0):
            source.to_evaluate = round_
        if last:
            source.finish()  # before `on_round`, which is to see the last evaluation
        if self.on_round is not None:
            self.on_round(round_, [self.history()])

    def history(self) -> History:
        """Return the rounds so far."""
        server, source = self.server, self.source
        history, clients = server.history, len(source.exchange.numbers)
        history.task, history.wall_seconds = f"Flower, {clients} clients", source.now
        mail = 0 if source.mail is None else source.mail.nbytes
        model = {} if server.diverged else self.wire.join(server.shown, source.rest)
        history.model = {name: torch.from_numpy(values) for name, values in model.items()} or None
        history.setting = {
            "clients": clients,
            **{name: value for name, value in values_of(self.options).items() if value is not None},
            "rounds": max(self.num_rounds, server.round),
            "parameters": self.wire.num_params,
            "bytes_per_upload": sum(values.nbytes for values in source.model.values()) + mail,
        }
        return history

    def _described(self) -> dict[str, Any]:
        """Return what must be the same when a run is resumed."""
        options, wire = self.options, self.wire
        return {
            "method": options.method.name,
            "num_clients": options.num_clients,
            "authenticated": options.authenticated,
            "privacy": [[part.noise_multiplier, part.clip, part.noise] for part in privates(options.method.strategy)],
            **{name: values_of(options)[name] for name in options_of(ServerOptions) if name not in NOT_DESCRIBED},
            "entries": [[name, kind, list(shape)] for name, (kind, shape) in wire.shapes.items()],
            "trained": wire.trained,
        }

    def _read(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return the run in the checkpoint's folder, if there is one."""
        if self.options.checkpoint is None:
            return None
        folder = Path(self.options.checkpoint)
        if not (folder / CHECKPOINT).exists():
            return None
        tensors, state = snapshot.read(folder / CHECKPOINT, CHECKPOINT_KIND)
        try:
            counts = whole("expected", state["expected"], 0), whole("round", state["server"]["round"], 0)
            require(max(counts) < MOST, "its numbers are absurd")
            require(isinstance(state["run"], str), "its run has no name")
        except (KeyError, TypeError, AttributeError, InvalidInput) as error:
            raise FedHistError(f"{folder} holds a run that cannot be resumed: {reason(error)}.") from error
        for name, value in self._described().items():
            if (stored := state.get(name)) != value:
                held = f"{folder} holds a run with {name}={stored!r}"
                raise FedHistError(f"{held}, this one has {value!r}; use another folder.")
        return tensors, state

    def _restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        folder, source = self.options.checkpoint, self.source
        try:
            self.server.restore(tensors, state["server"])
            source.restore([tensors])
            if source.exchange.of_mail is not None:
                source.exchange.of_mail.restore(state["mail"])
            source.exchange.numbers.update(state["clients"])
            if source.exchange.accounts is not None:
                source.exchange.accounts.admitted.update(state["admitted"])
            self._saved_round = self.server.round
            for metrics in METRICS:
                setattr(self.result, metrics, {int(r): MetricRecord(values) for r, values in state[metrics].items()})
            source.evaluations.resume()
            source.begin(float(state["elapsed"]))
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError, OverflowError) as error:
            raise FedHistError(f"{folder} holds a run that cannot be resumed: {reason(error)}.") from error
        source.exchange.note(source.now, "resumed")

    def _save(self) -> None:
        if self.options.checkpoint is None:
            return
        self.server.refuse_hidden_state()
        source, (tensors, facts) = self.source, self.server.state()
        numbers, accounts = source.exchange.numbers, source.exchange.accounts
        now = {"expected": self.expected, "server": facts, "elapsed": source.now, "clients": numbers}
        state = self._described() | now | {"admitted": sorted(accounts.admitted) if accounts else []}
        of_mail = source.exchange.of_mail
        state |= {"run": source.run, "mail": None if of_mail is None else of_mail.state()}
        for metrics in METRICS:
            state[metrics] = {str(r): dict(values) for r, values in getattr(self.result, metrics).items()}
        file = Path(self.options.checkpoint) / CHECKPOINT
        try:
            snapshot.write(file, CHECKPOINT_KIND, {**tensors, **source.state()[0]}, state)
            self._saved, self._saved_round = source.now, self.server.round
        except OSError as error:  # weeks of work must not end because a disk is full for a while
            what = f"{file} cannot be written: {error.strerror or error}"
            source.exchange.note(source.now, "not saved", reason=what)
            if accounts is not None and self._saved_round < self.server.round:  # nobody has been sent this model yet
                stopped = "the server stops before it publishes a model whose privacy a restart would not count"
                raise FedHistError(f"{what}; {stopped}.") from error


def privates(strategy: Strategy) -> list[Private]:
    """Return the parts of a strategy that account for privacy, the outermost first."""
    return [part for part in strategy.modules() if isinstance(part, Private)]
