"""Any fedhist strategy as a Flower strategy."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from logging import INFO
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedhist.errors import FedHistError, positive, whole
from fedhist.flower.evaluation import EvaluateFn
from fedhist.flower.mail import config_of
from fedhist.flower.options import Options
from fedhist.flower.session import Session
from fedhist.simulation.checkpoint import claimed
from fedhist.simulation.hooks import watching
from fedhist.store.deployed import CHECKPOINT

if TYPE_CHECKING:
    from fedhist.store.history import History


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class KAsync(Options):
    """Any fedhist strategy as a Flower strategy: exactly K uploads close a round, without waiting for the others.

    The model goes to every node once. The first K uploads make a new one, which goes to those K nodes while the
    others work on; an upload's staleness counts from the version its node was sent. Nodes may come, go, fail and
    send nonsense: what is not a well-formed, finite model of a plausible length never reaches the strategy, and
    every such event is in :attr:`history`.

    Options not listed here are those of a simulation's server (`strategy`, `k`, `server_lr`, `ema`, `bad_updates`,
    `max_norm_ratio`, `record`, `record_dtype`) and of the network (`concurrency`, `max_round_wait`, `max_staleness`,
    `max_examples`, `packed`, `message_ttl`, `poll_interval`, `refresh_interval`, and those of Flower's own strategies
    for evaluations and metrics).

    A subclass may extend Flower's methods: :meth:`configure_train` to change the configuration of a round or to leave
    out nodes, :meth:`aggregate_train` to do something with each new model.

    Parameters
    ----------
    num_clients
        How many different clients may take part. FedHist derives from it how many rounds it remembers. Without it,
        those connected at the start are counted for that, and there is room for more. A run may be resumed with more.
    authenticated
        Whether the SuperLink admits nodes with registered keys only, so that a node's id proves who it is. What clients
        call themselves has no effect then, and :class:`fedhist.Private` has an account for each node. Without it, a
        node that comes may be any client whose node is gone: under `Private` it waits for a minute and a half, and its
        account starts at the largest of theirs.
    min_available_nodes
        Nodes to wait for before the start; `k` by default.
    trainable
        Names of the entries the strategy works on, or a function of a name. By default all floating-point
        entries but running statistics. The others are averaged by examples, or as a defence has it.
    checkpoint
        A folder in which to save the server after every round; if it holds a run, that is resumed. What a round has
        changed is written while the next one is under way. Where privacy is counted it is written first, and a server
        that cannot save a round stops before it sends the new model to anybody.
    metrics
        Whether more is better, for each metric of `evaluate_fn` that the history keeps, the most important one first:
        ``{"auc": True, "rmse": False}``. By default all numbers it returns: accuracy first, else the loss, and less is
        better for what is called loss, perplexity, mae, mse or rmse. Without `evaluate_fn` the history has the means of
        what clients report.
    on_round
        A function, or a list of functions, called after every round with its number and the history so far in a list,
        as in a simulation. One that has a method `close` is closed when the run ends, however it ends.
    """

    session: Session = dataclasses.field(init=False, repr=False)

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
        configs = {MessageType.TRAIN: train, MessageType.EVALUATE: ConfigRecord(dict(evaluate_config or {}))}
        with contextlib.ExitStack() as stack:
            on_round = stack.enter_context(watching(self.on_round))
            if self.checkpoint is not None:  # two servers that resume one run would each count half of what it spends
                stack.enter_context(claimed(Path(self.checkpoint), CHECKPOINT, private=True))
            self._set(session=Session(self, grid, initial_arrays, num_rounds, timeout, configs, evaluate_fn, on_round))
            return self.session.run()

    def summary(self) -> None:
        """Log what will be run, as Flower's strategies do."""
        log(INFO, "\t├──> Nodes at work at a time: %s", self.concurrency or "all")
        log(
            INFO,
            "\t├──> Evaluation on clients: every %d rounds, a share of %g",
            self.evaluate_every,
            self.fraction_evaluate,
        )
        log(
            INFO,
            "\t└──> Keys in records: %r, %r, %r",
            self.weighted_by_key,
            self.arrayrecord_key,
            self.configrecord_key,
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages that send a version to the nodes that are idle.

        It is called once for each version. Nodes that become idle later, while it is still the current one, are sent
        what the first of these messages holds. `config` is the same object every time, and is saved in checkpoints.
        """
        return self._running().source.to_train(arrays, config)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Close a round with its replies, which come without arrays; return the new version and the mean metrics."""
        session = self._running()
        arrays = session.close(server_round)
        return arrays, session.mean_metrics(self.train_metrics_aggr_fn, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages that send the current version to a share of the nodes to be evaluated."""
        return self._running().source.to_evaluate_on_clients(arrays, config, server_round)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the mean of the metrics that clients have found."""
        return self._running().mean_metrics(self.evaluate_metrics_aggr_fn, replies)

    def _running(self) -> Session:
        if not hasattr(self, "session"):
            raise FedHistError(
                "KAsync takes its rounds in start() and not in those of another strategy. Flower's strategies for "
                "differential privacy on the server wait for synchronous rounds; fedhist.Private does not."
            )
        return self.session
