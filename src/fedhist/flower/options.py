"""All options of a K-async server on a network."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from fedhist.errors import flag, require, whole
from fedhist.flower.mail import check_clients_half
from fedhist.flower.metrics import checked
from fedhist.flower.network import NetworkOptions
from fedhist.flower.wire import Trainable
from fedhist.options import option
from fedhist.simulation.hooks import Hooks, listed
from fedhist.simulation.server_options import ServerOptions


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Options(ServerOptions, NetworkOptions):
    """What :class:`KAsync` is told; it says what each of them means."""

    k: int = dataclasses.field(default=10, kw_only=False, metadata=ServerOptions.__dataclass_fields__["k"].metadata)
    num_clients: int | None = option(None, "How many different clients may take part.", "Method")
    authenticated: bool = option(False, "Only nodes with registered keys are admitted.", "Network")
    min_available_nodes: int | None = None
    trainable: Trainable = None
    checkpoint: str | Path | None = None
    checkpoint_every: float | None = None
    metrics: Mapping[str, bool] | None = None
    on_round: Hooks | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.bad_updates != "accept", "bad_updates='accept' is for simulations; a network may send anything.")
        k, clients, nodes, every = self.k, self.num_clients, self.min_available_nodes, self.checkpoint_every
        self._check_network(k)
        fits = clients is None or whole("num_clients", clients, 1) >= k
        require(fits, f"k={k} uploads a round need at least as many clients, got num_clients={clients}.")
        whole("min_available_nodes", k if nodes is None else nodes, 1)
        flag("authenticated", self.authenticated)
        require(
            every is None, f"checkpoint_every={every} is not an option any more: each round is saved beside the next."
        )
        fits = self.record is None or self.max_round_wait is None
        require(
            fits, f"record needs K uploads in every round, so max_round_wait must be None, got {self.max_round_wait}."
        )
        self._set(metrics=checked(self.metrics))
        check_clients_half(self.method, clients, recorded=self.record is not None)
        listed(self.on_round)
