"""One run of a K-async server: messages out, replies in, rounds closed, everything written down."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from logging import INFO, WARNING
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from torch import Tensor

from fedhist.errors import DivergedError, FedHistError, reason
from fedhist.flower.client import upload_identity
from fedhist.flower.exchange import Arrival, Exchange, Upload
from fedhist.flower.metrics import MOST_EXAMPLES, averaged, examples_in, reported
from fedhist.flower.wire import LAYOUT, Wire, decode, pack, unpack
from fedhist.store import snapshot
from fedhist.store.history import History, Record
from fedhist.strategies import FedHist
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import widen
from fedhist.strategies.fedhist import default_history
from fedhist.strategies.screening import Refused

if TYPE_CHECKING:
    from fedhist.flower.kasync import KAsync

Rest = dict[str, Tensor]
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
CHECKPOINT, CHECKPOINT_KIND = "kasync.safetensors", "a checkpoint of a K-async server, 2"
ROOM = 1000
"""Clients there is room for, where nobody has said how many there are."""
LAST_WAIT = 60.0
"""Seconds to wait, at the end, for clients that still evaluate."""
BACKLOG = 4
"""Central evaluations that may wait before rounds wait for them."""
QUIET = ("joined", "returned", "enough nodes", "resumed")
"""Events that nobody needs to worry about."""
LINK_PATIENCE = 600.0
"""Seconds for which a SuperLink that cannot be reached is tried again."""


class Session:
    """One call of :meth:`KAsync.start`."""

    def __init__(
        self,
        options: KAsync,
        grid: Grid,
        initial_arrays: ArrayRecord,
        timeout: float,
        train_config: ConfigRecord | None,
        evaluate_config: ConfigRecord | None,
        evaluate_fn: EvaluateFn | None,
    ) -> None:
        self.options, self.grid, self.evaluate_fn = options, grid, evaluate_fn
        self.train_config = ConfigRecord() if train_config is None else train_config
        self.evaluate_config = ConfigRecord() if evaluate_config is None else evaluate_config
        try:
            state = {name: decode(array) for name, array in initial_arrays.items()}
            self.wire = Wire(state, options.trainable)
            self.model, self.rest = self.wire.split(state)
        except Refused as error:
            raise FedHistError(f"initial_arrays cannot be used: {error}.") from None
        self.timeout = timeout
        self.strategy = deepcopy(options.method.strategy)
        self.result = Result(arrays=initial_arrays)
        self.books: Exchange
        self.versions: dict[int, tuple[Tensor, Rest]] = {}
        """What was sent and may still come back changed."""
        self.rows: dict[str, list[list[float]]] = {"clients": [], "staleness": [], "arrived": [], "weights": []}
        self.records: list[Record] = []
        self._origin = options.clock.time()
        self._refreshed = -math.inf
        self._told = 0
        self._to_evaluate: int | None = None
        self._no_evaluation: set[int] = set()
        """Nodes that cannot evaluate, and are not asked again."""
        self._evaluating: dict[str, tuple[int, int, float]] = {}
        self._evaluated: dict[int, list[tuple[float, Mapping[str, Any]]]] = {}
        self._central: list[tuple[int, float | None, Future[MetricRecord | None]]] = []
        """Rounds under evaluation, and the privacy spent until then."""

    @property
    def now(self) -> float:
        """Seconds since the first start."""
        return float(self.options.clock.time()) - self._origin

    def run(self, num_rounds: int) -> Result:
        """Take the server to the end of its rounds."""
        name = self.options.method.name
        log(INFO, "%s, K-async: %d rounds of %d uploads", name, num_rounds, self.options.k)
        with ThreadPoolExecutor(1, "evaluate_fn") as self._thread:
            if not self._resumed():
                self._begin()
            while self.books.version <= num_rounds:
                self._refresh()
                self._send()
                self._evaluate_on_clients()  # after those who get the model to train on
                self._receive()
                self.books.give_up(self.now)
                self._take_in_evaluations()
                taken = self.books.full(self.now)
                self._tell()
                if taken is None:
                    self.options.clock.sleep(self.options.poll_interval)
                else:
                    self._close_round(taken, last=self.books.version == num_rounds)
            self._finish()
        self._tell()
        log(INFO, "%s: %d rounds in %.1f s, %d events", name, num_rounds, self.now, len(self.books.events))
        return self.result

    # ---------------------------------------------------------------- start

    def _begin(self) -> None:
        wanted, told = max(self.options.min_available_nodes, 1), False
        while len(nodes := self._node_ids()) < wanted:
            if not told:
                log(INFO, "waiting for %d nodes, %d are connected", wanted, len(nodes))
                told = True
            self.options.clock.sleep(self.options.refresh_interval)
        self._set_up(self.options.num_clients or max(len(nodes), self.options.k))
        self._publish()
        self._evaluate_centrally(0)

    def _set_up(self, expected: int) -> None:
        """Prepare for so many clients and, if nobody has said how many there are, leave room for more."""
        options = self.options
        room = options.num_clients or max(ROOM, 10 * expected)
        for part in self.strategy.modules():  # it may be inside another one
            if isinstance(part, FedHist) and part.history is None:
                part.history = default_history(expected, options.k)  # room must not lengthen its memory
        self.strategy.setup(room, options.k, self.wire.num_params)
        if self.wire.dtype == torch.float64:
            widen(self.strategy)
        self.expected = expected
        self.books = Exchange(
            options.k, room, self.timeout, options.max_round_wait, options.max_norm_ratio, options.bad_updates
        )
        self.books.opened = self.now

    def _publish(self) -> None:
        """Remember the current version as clients will see it."""
        try:
            sent = self.wire.as_sent(self.model, self.rest)
        except Refused as error:
            name, round_ = self.options.method.name, self.books.version - 1
            raise DivergedError(f"{name} diverged in round {round_}: {error}.") from None
        self.versions[self.books.version] = sent
        self.books.screen.norms.model = _length(self.model)

    def _resumed(self) -> bool:
        folder = self.options.checkpoint
        if folder is None:
            return False
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FedHistError(f"checkpoint={folder} cannot be written: {error.strerror}.") from error
        if not (folder / CHECKPOINT).exists():
            return False
        tensors, state = snapshot.read(folder / CHECKPOINT, CHECKPOINT_KIND)
        own = self._described()
        for name, value in own.items():
            if state.get(name) != value:
                raise FedHistError(
                    f"{folder} holds a run with {name}={state.get(name)!r}, this one has {value!r}; use another folder."
                )
        try:
            self._restore(tensors, state)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise FedHistError(f"{folder} holds a run that cannot be gone on with: {reason(error)}.") from error
        log(INFO, "going on from round %d in %s", self.books.version, folder)
        if self.books.version - 1 not in self.result.evaluate_metrics_serverapp:
            self._evaluate_centrally(self.books.version - 1)
        return True

    def _restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        self._set_up(state["expected"])
        self.model = tensors["model"]
        self.rest = {name: tensors[f"rest.{name}"] for name in self.rest}
        memory = {name.removeprefix("strategy."): t for name, t in tensors.items() if name.startswith("strategy.")}
        self.strategy.load_state_dict(memory)
        self.rows = {name: tensors[f"rows.{name}"].tolist() for name in self.rows}
        self.records = [Record(**record) for record in state["records"]]
        self.books.version, self.books.events = state["version"], state["events"]
        self.books.clients.numbers = state["clients"]
        self.books.screen.norms.recent.extend(state["norms"])
        for metrics in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
            setattr(self.result, metrics, {int(r): MetricRecord(values) for r, values in state[metrics].items()})
        self._origin -= state["elapsed"]
        self.books.opened = self.now
        self._publish()
        self.result.arrays = self.wire.record(self.model, self.rest)
        self._told = len(self.books.events)
        self.books.note(self.now, "resumed")

    def _described(self) -> dict[str, Any]:
        """Return what must be the same when a run goes on."""
        return {
            "method": self.options.method.name,
            "k": self.options.k,
            "num_clients": self.options.num_clients,
            "server_lr": self.options.server_lr,
            "entries": [[name, kind, list(shape)] for name, (kind, shape) in self.wire.shapes.items()],
            "trained": self.wire.trained,
        }

    def _save(self) -> None:
        if self.options.checkpoint is None:
            return
        tensors = {"model": self.model}
        tensors |= {f"rest.{name}": values for name, values in self.rest.items()}
        tensors |= {f"strategy.{name}": values for name, values in self.strategy.state_dict().items()}
        tensors |= {f"rows.{name}": torch.tensor(rows, dtype=torch.float64) for name, rows in self.rows.items()}
        state = self._described() | {
            "expected": self.expected,
            "version": self.books.version,
            "elapsed": self.now,
            "clients": self.books.clients.numbers,
            "norms": list(self.books.screen.norms.recent),
            "events": self.books.events,
            "records": [vars(record) for record in self.records],
        }
        for metrics in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
            state[metrics] = {str(r): dict(values) for r, values in getattr(self.result, metrics).items()}
        folder = self.options.checkpoint
        try:
            snapshot.write(folder / CHECKPOINT, CHECKPOINT_KIND, tensors, state)
        except OSError as error:  # weeks of work must not end because a disk is full for a while
            reason = error.strerror or str(error)
            self.books.note(self.now, "not saved", reason=f"{folder / CHECKPOINT} cannot be written: {reason}")

    def _tell(self) -> None:
        """Log what has happened since the last time."""
        for event in self.books.events[self._told :]:
            facts = ", ".join(f"{name} {value}" for name, value in event.items() if name not in ("time", "event"))
            log(INFO if event["event"] in QUIET else WARNING, "%s: %s", event["event"], facts)
        self._told = len(self.books.events)

    # ------------------------------------------------------------- messages

    def _refresh(self) -> None:
        if self.now - self._refreshed < self.options.refresh_interval:
            return
        self.books.membership(self._node_ids(), self.now)
        self._refreshed = self.now

    def _send(self) -> None:
        nodes = self.books.due(self.now)
        if not nodes:
            return
        round_ = self.books.version
        for node, message in zip(nodes, self._push(nodes, MessageType.TRAIN, round_, self.train_config), strict=True):
            if message:
                self.books.sent(node, message, self.now)
            else:
                self.books.refused(node, self.now)

    def _push(self, nodes: Sequence[int], kind: str, round_: int, config: ConfigRecord) -> list[str | None]:
        """Send the current model to nodes and return the messages' ids, None for those that did not go."""
        told = ConfigRecord({**config, "server-round": round_})
        content = RecordDict({self.options.configrecord_key: told})
        key = self.options.arrayrecord_key
        if self.options.packed:
            content[key], content[LAYOUT] = pack(self.wire.join(self.model, self.rest))
        else:
            content[key] = self.wire.record(self.model, self.rest)
        ttl = self.options.message_ttl
        messages = [Message(content, node, kind, ttl=ttl, group_id=str(round_)) for node in nodes]
        ids = list(self._patiently(lambda: self.grid.push_messages(messages)))
        # The in-memory grid leaves out what it did not take, and then nobody knows which is which.
        return [each or None for each in ids] if len(ids) == len(nodes) else [None] * len(nodes)

    def _receive(self) -> None:
        pending = [*self.books.pending, *self._evaluating]
        if not pending:
            return
        replies = list(self._patiently(lambda: self.grid.pull_messages(pending)))
        for message in sorted(replies, key=lambda reply: reply.metadata.created_at):
            self._take_in(message)
        held = self.books.held
        self.versions = {version: model for version, model in self.versions.items() if version in held}

    def _take_in(self, message: Message) -> None:
        to = message.metadata.reply_to_message_id
        if to in self._evaluating:
            round_, node, _ = self._evaluating.pop(to)
            if message.has_error():
                self._no_evaluation.add(node)
                self.books.note(self.now, "evaluation failed", node, reason=f"{_reason(message)}; not asked again")
            else:
                self._keep_evaluation(round_, node, message)
            return
        version = self.books.version_of(to)
        if message.has_error():
            self.books.failed(to, _reason(message), self.now)
            return
        if version is None:
            self.books.replied(to, "nobody waits for it", self.now)
            return
        try:
            upload: Upload | str = self._upload(message, *self.versions[version])
        except Refused as error:
            upload = str(error)
        except Exception as error:  # whatever a reply holds, it must not stop the server
            upload = f"it cannot be read: {type(error).__name__}: {error}"
        self.books.replied(to, upload, self.now)

    def _upload(self, message: Message, sent: Tensor, sent_rest: Rest) -> Upload:
        content = message.content
        local, rest = self.wire.split(unpack(content, self.options.arrayrecord_key))
        delta, apart = sent - local, {name: values - sent_rest[name] for name, values in rest.items()}
        for name in self.wire.counts:
            if bool((apart[name].abs() > MOST_EXAMPLES).any()):
                raise Refused(f"entry {name!r} has changed beyond belief")
        moved = [delta, *(values for name, values in apart.items() if name not in self.wire.counts)]
        norm = math.sqrt(sum(_length(values) ** 2 for values in moved))
        rest = {name: apart[name] if name in self.wire.counts else values for name, values in rest.items()}
        metrics = reported(content)
        return Upload(
            delta, rest, examples_in(metrics, self.options.weighted_by_key), norm, upload_identity(content), metrics
        )

    # --------------------------------------------------------------- rounds

    def _close_round(self, taken: Sequence[Arrival], last: bool) -> None:
        round_, now = self.books.version, self.now
        examples = torch.tensor([arrival.upload.num_examples for arrival in taken], dtype=torch.float64)
        staleness = [round_ - arrival.version + 1 for arrival in taken]
        arrivals = Arrivals(
            deltas=torch.stack([arrival.upload.delta for arrival in taken]),
            staleness=torch.tensor(staleness),
            clients=torch.tensor([arrival.client for arrival in taken]),
            num_examples=examples,
        )
        with torch.no_grad():
            update = self.strategy(arrivals)
            self.model = self.model - self.options.server_lr * update
        self.rest = self._averaged_rest(taken, examples / examples.sum())
        self._write_down(taken, staleness)
        weights = [(arrival.upload.num_examples, arrival.upload.metrics) for arrival in taken]
        self.result.train_metrics_clientapp[round_] = averaged(weights, self.options.weighted_by_key)
        who = ", ".join(f"{a.client} (τ {stale})" for a, stale in zip(taken, staleness, strict=True))
        log(INFO, "round %d closed at %.1f s with clients %s", round_, now, who)
        self.books.close(taken, now)
        self._publish()
        self._take_in_evaluations()
        if last or round_ % self.options.checkpoint_every == 0:
            self._save()
        self._evaluate_centrally(round_)
        if self.options.evaluate_every and round_ % self.options.evaluate_every == 0:
            self._to_evaluate = round_
        if self.options.on_round is not None:
            self.options.on_round(round_, [self.history()])

    def _averaged_rest(self, taken: Sequence[Arrival], shares: Tensor) -> Rest:
        """Return the entries that nobody trains: statistics are averaged, counts go on by the average increase."""
        rest = {}
        for name, values in self.rest.items():
            mean = torch.stack([p * arrival.upload.rest[name] for p, arrival in zip(shares, taken, strict=True)]).sum(0)
            rest[name] = values + torch.round(mean).long() if name in self.wire.counts else mean
        return rest

    def _write_down(self, taken: Sequence[Arrival], staleness: Sequence[int]) -> None:
        """Keep a row of the history; a round with fewer than K uploads is filled up with client -1."""
        empty = self.options.k - len(taken)
        weights = self.strategy.last_weights
        self.rows["clients"].append([*(arrival.client for arrival in taken), *[-1] * empty])
        self.rows["staleness"].append([*staleness, *[0] * empty])
        self.rows["arrived"].append([*(arrival.time for arrival in taken), *[taken[-1].time] * empty])
        known = [math.nan] * len(taken) if weights is None else weights.tolist()
        self.rows["weights"].append([*known, *[0.0] * empty])

    def history(self) -> History:
        """Return the rounds so far."""
        k = self.options.k
        rows = {name: np.array(rows, dtype=np.float64).reshape(-1, k) for name, rows in self.rows.items()}
        return History(
            method=self.options.method.name,
            seed=0,
            task=f"Flower, {len(self.books.clients.numbers)} clients",
            clients=rows["clients"].astype(np.int64),
            staleness=rows["staleness"].astype(np.int64),
            arrived=rows["arrived"],
            weights=rows["weights"].astype(np.float32),
            records=list(self.records),
            wall_seconds=self.now,
            model={name: torch.from_numpy(values) for name, values in self.wire.join(self.model, self.rest).items()},
            events=list(self.books.events),
            setting={
                "clients": len(self.books.clients.numbers),
                "k": k,
                "server_lr": self.options.server_lr,
                "parameters": self.model.numel(),
                "bytes_per_upload": sum(
                    math.prod(shape) * np.dtype(kind).itemsize for kind, shape in self.wire.shapes.values()
                ),
            },
        )

    # ----------------------------------------------------------- evaluation

    def _evaluate_centrally(self, round_: int) -> None:
        if self.evaluate_fn is None:
            return
        model, rest, evaluate = self.model, self.rest, self.evaluate_fn
        result = self._thread.submit(lambda: evaluate(round_, self.wire.record(model, rest)))
        self._central.append((round_, self.strategy.epsilon(), result))
        if len(self._central) > BACKLOG:
            self._central[0][-1].exception()  # waits

    def _evaluate_on_clients(self) -> None:
        round_, self._to_evaluate = self._to_evaluate, None
        if round_ is None:
            return
        nodes = sorted(set(self._node_ids()) - self._no_evaluation)
        count = math.ceil(self.options.fraction_evaluate * len(nodes))
        if count == 0:
            return
        # Places, not nodes: their numbers have 64 bits and no sign.
        chosen = [nodes[place] for place in np.random.default_rng(round_).permutation(len(nodes))[:count]]
        self._evaluated[round_] = []
        messages = self._push(chosen, MessageType.EVALUATE, round_, self.evaluate_config)
        for node, message in zip(chosen, messages, strict=True):
            if message:
                self._evaluating[message] = round_, node, self.now

    def _keep_evaluation(self, round_: int, node: int, message: Message) -> None:
        try:
            metrics = reported(message.content)
            self._evaluated[round_].append((examples_in(metrics, self.options.weighted_by_key), metrics))
        except Exception as error:  # whatever a reply holds, it must not stop the server
            self.books.note(self.now, "evaluation failed", node, reason=str(error))

    def _take_in_evaluations(self) -> None:
        while self._central and self._central[0][-1].done():
            round_, epsilon, future = self._central.pop(0)
            try:
                metrics = future.result()
            except BaseException:
                self._thread.shutdown(wait=False, cancel_futures=True)  # those behind it would only be in the way
                raise
            if metrics is not None:
                self.result.evaluate_metrics_serverapp[round_] = metrics
                self._record(round_, metrics, epsilon)
        for message, (_, node, since) in list(self._evaluating.items()):
            if self.now - since > self.timeout:
                self._forget_evaluation(message, node)
        for round_ in list(self._evaluated):
            if all(other != round_ for other, _, _ in self._evaluating.values()):
                replies = self._evaluated.pop(round_)
                if replies:
                    self.result.evaluate_metrics_clientapp[round_] = averaged(replies, self.options.weighted_by_key)

    def _forget_evaluation(self, message: str, node: int) -> None:
        del self._evaluating[message]
        self.books.note(self.now, "evaluation failed", node, reason="no reply in time")

    def _record(self, round_: int, metrics: MetricRecord, epsilon: float | None) -> None:
        accuracy, loss = metrics.get("accuracy"), metrics.get("loss")
        if not isinstance(accuracy, (int, float)) or not math.isfinite(accuracy) or round_ == 0:
            return
        since = self.records[-1].round if self.records else 0
        stale = [value for row in self.rows["staleness"][since:round_] for value in row if value > 0]
        self.records.append(
            Record(
                round=round_,
                time=self.rows["arrived"][round_ - 1][-1],
                accuracy=float(accuracy),
                loss=float(loss) if isinstance(loss, (int, float)) and math.isfinite(loss) else None,
                per_class=[],
                mean_staleness=sum(stale) / max(len(stale), 1),
                max_staleness=int(max(stale, default=0)),
                epsilon=epsilon,
            )
        )

    # ------------------------------------------------------------------ end

    def _finish(self) -> None:
        self._evaluate_on_clients()
        for _, _, future in self._central:
            future.exception()  # waits
        until = self.now + min(LAST_WAIT, self.timeout)
        while self._evaluating and self.now < until:
            self.options.clock.sleep(self.options.poll_interval)
            self._receive_evaluations()
        for message, (_, node, _) in list(self._evaluating.items()):
            self._forget_evaluation(message, node)
        self._take_in_evaluations()
        self.result.arrays = self.wire.record(self.model, self.rest)
        self._save()

    def _receive_evaluations(self) -> None:
        for message in list(self._patiently(lambda: self.grid.pull_messages(list(self._evaluating)))):
            self._take_in(message)

    def _node_ids(self) -> list[int]:
        return list(self._patiently(self.grid.get_node_ids))

    def _patiently(self, ask: Callable[[], Iterable[Any]]) -> Iterable[Any]:
        """Ask the SuperLink, again and again while it cannot be reached: it may be restarting."""
        started, told = self.options.clock.time(), False
        while True:
            try:
                return ask()
            except httpx.TransportError as error:
                if self.options.clock.time() - started > LINK_PATIENCE:
                    raise FedHistError(f"the SuperLink cannot be reached: {error}.") from error
                if not told:
                    log(WARNING, "the SuperLink cannot be reached (%s); trying again", error)
                    told = True
                self.options.clock.sleep(self.options.refresh_interval)


def _length(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64))


def _reason(message: Message) -> str:
    return f"error {message.error.code}: {str(message.error.reason)[:200]}"
