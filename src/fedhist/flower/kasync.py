"""Any fedhist strategy as a Flower strategy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedhist.errors import FedHistError, choice, number, positive, require, whole
from fedhist.flower.client import ARRAYS, CONFIG, EXAMPLES
from fedhist.flower.session import EvaluateFn, Session
from fedhist.simulation.methods import Method, as_method
from fedhist.store.history import History
from fedhist.strategies import Private, Strategy
from fedhist.strategies.screening import MAX_NORM_RATIO, POLICIES


class Clock(Protocol):
    """What of the ``time`` module is needed; a test has its own."""

    def time(self) -> float:
        """Return the seconds since some moment."""

    def sleep(self, seconds: float, /) -> None:
        """Let time pass."""


class _Monotonic:
    """A clock that nobody sets."""

    def time(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float, /) -> None:
        time.sleep(seconds)


def _is_private(strategy: Strategy) -> bool:
    return any(isinstance(part, Private) for part in strategy.modules())


class KAsync:
    """Any fedhist strategy as a Flower strategy: exactly K uploads close a round, and nobody waits for the others.

    The model goes to every node once. The first K uploads make a new one, which goes to those K nodes while the
    others work on; an upload's staleness counts from the version its node was sent. Nodes may come, go, fail and
    send nonsense: what is not a well-formed, finite model of a plausible length never reaches the strategy, and
    every such event is in :attr:`history`.

    Parameters
    ----------
    strategy
        A :class:`fedhist.Strategy` or a name such as "fedhist".
    k
        Uploads that close a round.
    num_clients
        How many different clients may take part. FedHist derives from it how many rounds it remembers. Without it,
        those connected at the start are counted for that, and there is room for more.
    min_available_nodes
        Nodes to wait for before the start; `k` by default.
    server_lr
        `η` in Eq. 4.
    message_ttl
        Seconds a message and its reply are valid; longer than the slowest client works. By default Flower's 12 h.
    poll_interval, refresh_interval
        Seconds between looks for replies, and for nodes that came or went.
    max_round_wait
        Seconds after which a round closes with fewer than K uploads, if there is one at all. None always waits.
    max_norm_ratio
        Uploads so many times as long as usual are bad.
    bad_updates
        What to do with an upload that cannot be read, is no number or is absurdly long: "reject" it, "clip" it if
        only its length is wrong, or "stop".
    trainable
        Names of the entries the strategy works on, or a function of a name. By default all floating-point
        entries but running statistics. The others are averaged by examples.
    packed
        Send models as a single array, far faster for models of many tensors; clients then need
        :func:`fedhist.flower.load` or :func:`~fedhist.flower.received`.
    evaluate_every, fraction_evaluate
        Rounds between evaluations on clients (0: none) and the share of the nodes that take part. Rounds go on.
    checkpoint, checkpoint_every
        Folder in which the server's state is kept, every so many rounds. A new run with the same folder goes on
        from it.
    on_round
        Called after every round with its number and the history so far in a list, as in a simulation.
    """

    def __init__(
        self,
        strategy: Strategy | str | Method,
        k: int,
        *,
        num_clients: int | None = None,
        min_available_nodes: int | None = None,
        server_lr: float = 1.0,
        message_ttl: float | None = None,
        poll_interval: float = 0.5,
        refresh_interval: float = 2.0,
        max_round_wait: float | None = None,
        max_norm_ratio: float = MAX_NORM_RATIO,
        bad_updates: str = "reject",
        trainable: Iterable[str] | Callable[[str], bool] | None = None,
        packed: bool = False,
        evaluate_every: int = 10,
        fraction_evaluate: float = 1.0,
        checkpoint: str | Path | None = None,
        checkpoint_every: int = 1,
        on_round: Callable[[int, Sequence[History]], None] | None = None,
        arrayrecord_key: str = ARRAYS,
        configrecord_key: str = CONFIG,
        weighted_by_key: str = EXAMPLES,
        clock: Clock | None = None,
    ) -> None:
        self.method = as_method(strategy)
        self.k = whole("k", k, 1)
        self.num_clients = None if num_clients is None else whole("num_clients", num_clients, 1)
        require(
            self.num_clients is None or self.num_clients >= k,
            f"k={k} uploads a round need at least as many clients, got num_clients={num_clients}.",
        )
        nodes = k if min_available_nodes is None else min_available_nodes
        self.min_available_nodes = whole("min_available_nodes", nodes, 1)
        self.server_lr = positive("server_lr", server_lr)
        self.message_ttl = None if message_ttl is None else positive("message_ttl", message_ttl)
        self.poll_interval = positive("poll_interval", poll_interval)
        self.refresh_interval = positive("refresh_interval", refresh_interval)
        self.max_round_wait = None if max_round_wait is None else number("max_round_wait", max_round_wait, 0)
        self.max_norm_ratio = positive("max_norm_ratio", max_norm_ratio)
        self.bad_updates = choice("bad_updates", bad_updates, POLICIES)
        self.trainable, self.packed = trainable, packed
        self.evaluate_every = whole("evaluate_every", evaluate_every, 0)
        self.fraction_evaluate = number("fraction_evaluate", fraction_evaluate, 0, 1)
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        self.checkpoint_every = whole("checkpoint_every", checkpoint_every, 1)
        require(
            self.checkpoint is None or checkpoint_every == 1 or not _is_private(self.method.strategy),
            f"checkpoint_every={checkpoint_every} would let a restart forget uploads whose privacy is spent; use 1.",
        )
        require(on_round is None or callable(on_round), f"on_round must be a function, got {on_round!r}.")
        self.on_round = on_round
        self.arrayrecord_key, self.configrecord_key = arrayrecord_key, configrecord_key
        self.weighted_by_key = weighted_by_key
        self.clock = _Monotonic() if clock is None else clock
        self._session: Session | None = None

    @property
    def history(self) -> History:
        """What happened so far, in the form a simulation has."""
        if self._session is None:
            raise FedHistError("there is no history before start().")
        return self._session.history()

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
        self._session = Session(self, grid, initial_arrays, timeout, train_config, evaluate_config, evaluate_fn)
        return self._session.run(num_rounds)
