"""One call of KAsync's `start`: from the first node to the last evaluation."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Iterable
from copy import deepcopy
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from torch import Tensor

from fedhist.clients.objectives import uses_mail
from fedhist.errors import FedHistError, reason, require
from fedhist.flower.accounts import Accounts
from fedhist.flower.evaluation import EvaluateFn, Evaluations
from fedhist.flower.exchange import DELTA, MAIL, STATISTICS, Exchange
from fedhist.flower.log import dated, log_end, log_round
from fedhist.flower.memory import planned
from fedhist.flower.metrics import as_record
from fedhist.flower.network import MetricsFn
from fedhist.flower.numbers import listed
from fedhist.flower.options import Options
from fedhist.flower.saved import Saved, privates
from fedhist.flower.source import Network
from fedhist.flower.wire import Wire, decode
from fedhist.options import values_of
from fedhist.simulation.hooks import OnRound
from fedhist.simulation.server import Server, about_recording
from fedhist.store.deployed import CHECKPOINT, read_state, room_for
from fedhist.store.history import History, sample
from fedhist.store.recording import Tape, check_room
from fedhist.strategies import FedHist, Strategy
from fedhist.strategies.rules.fedhist import default_h
from fedhist.strategies.screening import Rejected, Screen


class Session:
    """One call of :meth:`KAsync.start`."""

    def __init__(
        self,
        options: Options,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int,
        timeout: float,
        configs: dict[str, ConfigRecord],
        evaluate_fn: EvaluateFn | None,
        on_round: OnRound | None,
    ) -> None:
        self.options, self.num_rounds, self.on_round = options, num_rounds, on_round
        try:
            state = {name: decode(array) for name, array in initial_arrays.items()}
            self.wire = Wire(state, options.trainable)
            model, rest = self.wire.split(state)
        except Rejected as error:
            raise FedHistError(f"initial_arrays cannot be used: {error}.") from None
        self.saved = None if options.checkpoint is None else Saved(Path(options.checkpoint), options, self.wire)
        before = None if self.saved is None else read_state(self.saved.folder)
        if self.saved is not None and before is not None:
            self.saved.check(before.facts)
        self.expected = self._wait_for_nodes(grid) if before is None else int(before.facts["expected"])
        self.room = room = room_for(options.num_clients, self.expected)
        rounds = num_rounds if before is None else max(num_rounds, int(before.facts["server"]["round"]))
        own = dataclasses.replace(options, strategy=self._strategy())
        for line in planned(options, own.method.strategy, self.wire, self.expected, room):
            log(INFO, "%s", line)
        history = History.begun(options.method.name, 0, "Flower", options.k)
        history.about_clients = {"id": sample(room)}
        tape = self._tape(own, model, room, resumed=before is not None)
        server = self.server = Server(own, model, room, rounds, history, tape=tape, name=options.method.name)
        self.result = Result(arrays=initial_arrays)
        exchange = self._exchange(timeout)
        history.id = run = secrets.token_hex(8) if before is None else before.facts["run"]
        evaluations = Evaluations(
            server, self.result, exchange.note, evaluate_fn, timeout, aggregate=options.aggregate_evaluate,
            key=options.weighted_by_key, most_examples=options.max_examples, client_of=self._client_of,
            metrics=options.metrics,
        )  # fmt: skip
        self.source = Network(options, grid, server, exchange, evaluations, self.wire, rest, configs, run)
        if before is None or self.saved is None:
            self.source.begin()
        else:
            self.saved.restore(before, server, self.source, self.result, room)

    def _wait_for_nodes(self, grid: Grid) -> int:
        """Wait until there are enough nodes; return how many clients to expect."""
        options, wanted = self.options, self.options.min_available_nodes or self.options.k
        log(INFO, "waiting for %d nodes", wanted)
        while (connected := len(options.patiently(grid.get_node_ids))) < wanted:
            options.clock.sleep(options.refresh_interval)
        return options.num_clients or max(connected, options.k)

    def _strategy(self) -> Strategy:
        """Return the strategy, whose memory room for more clients must not lengthen."""
        strategy = deepcopy(self.options.method.strategy)
        for part in strategy.modules():  # it may be inside another one
            if isinstance(part, FedHist) and part.h is None:
                part.h = default_h(self.expected, self.options.k)
        return strategy

    def _exchange(self, timeout: float) -> Exchange:
        """Return what keeps track of nodes and uploads, with a screen for each part of these."""
        options, server = self.options, self.server
        counting = privates(server.strategy)
        accounts = Accounts(counting, self.room, authenticated=options.authenticated) if counting else None
        if counting and options.checkpoint is None:
            log(WARNING, "without a checkpoint, a server that is started again counts the privacy spent from zero")
        parts = [STATISTICS] + [MAIL] * uses_mail(options.method.objective)
        judging, length = server.screen.judging, server.screen.model
        screens = {
            part: Screen(options.bad_updates, options.max_norm_ratio, length, self.room, judging=judging)
            for part in parts
        }
        return Exchange(
            {DELTA: server.screen} | screens, dated(server.note), options.k, self.room, timeout,
            max_round_wait=options.max_round_wait, max_staleness=options.max_staleness,
            concurrency=options.concurrency, accounts=accounts, names=not options.authenticated,
        )  # fmt: skip

    def _client_of(self, node: int) -> int | None:
        exchange = self.source.exchange
        return exchange.numbers.get(listed(node, exchange.nodes[node].identity))

    def _tape(self, options: Options, model: Tensor, room: int, *, resumed: bool) -> Tape | None:
        """Return what records the uploads, if they are to be recorded."""
        if options.record is None:
            return None
        about = about_recording(options, self.num_rounds, self.wire.num_params, room, self.wire.dtype)
        if not resumed:
            check_room({options.record: about}, resumable=options.checkpoint is not None)
        with contextlib.suppress(OSError):  # which the tape raises as well, in a sentence
            options.record.parent.mkdir(parents=True, exist_ok=True)
            options.record.mkdir(0o700, exist_ok=True)
        return Tape(options.record, about, model)

    def run(self) -> Result:
        """Take the server to the end of its rounds."""
        name, server, source, options = self.options.method.name, self.server, self.source, self.options
        log(INFO, "%s, K-async: %d rounds of exactly %d uploads", name, self.num_rounds, options.k)
        options.summary()
        with contextlib.ExitStack() as stack:
            stack.callback(source.close)
            if self.saved is not None:
                stack.callback(self.saved.close)
            if server.tape is not None:
                stack.callback(server.tape.close)
                server.tape.begin(server.round)
            if server.round not in self.result.evaluate_metrics_serverapp:
                source.evaluations.on_server(server.round, source.shown)
            left = range(server.round + 1, self.num_rounds + 1)
            for round_ in left:
                replies = [arrival.upload.reply for arrival in source.wait()]
                self._raise_if_diverged()
                arrays, metrics = options.aggregate_train(round_, replies)
                self._raise_if_diverged()
                metrics = as_record("aggregate_train()", metrics)
                same = server.round == round_ and (arrays is None or arrays is source.arrays)
                require(same, "aggregate_train() must call that of KAsync once, and return its arrays as they are.")
                self._after(round_, metrics)
            source.finish()
            if not left and self.on_round is not None:  # which may not have seen the last evaluation
                self.on_round(server.round, [self.history()])
            self.result.arrays = source.shown
            self._save()
            self._wait()
        if server.tape is not None:
            self.history().save(server.tape.folder)
        log_end(server.history, source.now, self.result)
        return self.result

    def close(self, round_: int) -> ArrayRecord | None:
        """Close a round with the uploads that were waited for; return the new version."""
        self._wait()  # what is being written must not change
        for server, arrivals in self.source.next():
            with torch.no_grad():
                server.close(arrivals)  # Eq. 4
        return None if self.server.diverged is not None else self.source.arrays

    def _raise_if_diverged(self) -> None:
        if self.server.diverged is not None:
            self.server.diverged.histories = [self.history()]
            raise self.server.diverged

    def _after(self, round_: int, metrics: MetricRecord | None) -> None:
        """Do what follows a round."""
        options, server, source, last = self.options, self.server, self.source, round_ == self.num_rounds
        if metrics is not None:
            self.result.train_metrics_clientapp[round_] = metrics
        staleness = {arrival.client: round_ - arrival.version + 1 for arrival in source.taken}
        log_round(round_, self.num_rounds, source.now, staleness, metrics or {})
        source.evaluations.take_in(source.now)
        server.trace(round_)
        if server.tape is not None:
            server.tape.write(round_, flush=True)  # a checkpoint is never ahead of the recording
        self._save()
        source.evaluations.on_server(round_, source.shown)
        if options.evaluate_every and (last or round_ % options.evaluate_every == 0):
            source.to_evaluate = round_
        if last:
            source.finish()  # before `on_round`, which is to see the last evaluation
        if self.on_round is not None:
            self.on_round(round_, [self.history()])

    def mean_metrics(self, aggregate: MetricsFn, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the metrics of replies as one record; a function that fails at them must not end the run."""
        try:
            metrics = aggregate([reply.content for reply in replies], self.options.weighted_by_key)
            return as_record("a function that aggregates metrics", metrics)
        except Exception as error:
            what = f"{type(error).__name__}: {reason(error)}"
            self.source.exchange.note(self.source.now, "metrics failed", reason=what)
            return None

    def history(self) -> History:
        """Return the rounds so far."""
        server, source = self.server, self.source
        history, clients = server.history, len(source.exchange.numbers)
        history.task, history.wall_seconds = f"Flower, {clients} clients", source.now
        model = {} if server.diverged else self.wire.join(server.shown, source.rest)
        history.model = {name: torch.from_numpy(values) for name, values in model.items()} or None
        history.setting = self.setting()
        return history

    def setting(self) -> dict[str, Any]:
        """Return what the run is, as a history has it."""
        source = self.source
        size = sum(values.nbytes for values in source.model.values())
        size += 0 if source.mail is None else source.mail.nbytes
        return {
            "clients": len(source.exchange.numbers),
            **{name: value for name, value in values_of(self.options).items() if value is not None},
            "rounds": max(self.num_rounds, self.server.round),
            "parameters": self.wire.num_params,
            "bytes_per_upload": size,
            "bytes_per_download": size,
        }

    def _save(self) -> None:
        """Begin to save the round; where privacy is counted, wait until it is saved: nobody has been sent it yet."""
        self._wait()
        if self.saved is not None:
            self.saved.begin(self.server, self.source, self.result, self.expected, self.setting())
            if self.source.exchange.accounts is not None:
                self._wait()

    def _wait(self) -> None:
        """Wait until the last round is saved."""
        if self.saved is None:
            return
        try:
            self.saved.wait()
        except OSError as error:  # weeks of work must not end because a disk is full for a while
            what = f"{self.saved.folder / CHECKPOINT} cannot be written: {error.strerror or error}"
            self.source.exchange.note(self.source.now, "not saved", reason=what)
            if self.source.exchange.accounts is not None and self.saved.round < self.server.round:
                stopped = "the server stops before it publishes a model whose privacy a restart would not count"
                raise FedHistError(f"{what}; {stopped}.") from error
