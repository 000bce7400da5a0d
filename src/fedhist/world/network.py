"""How long the network takes."""

from dataclasses import dataclass, fields
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from fedhist.errors import number, positive, require
from fedhist.options import build, named, parse_options
from fedhist.streams import Stream
from fedhist.world.devices import DeviceTable

Floats = NDArray[np.float64]


class Transfers(Protocol):
    """Anything that says how long traffic takes: :class:`Network`, :class:`DeviceTable` or one's own."""

    def times(self, num_clients: int, seed: int, upload: float, download: float) -> Floats:
        """Return the seconds that one training's traffic takes, ``(N,)``, given its bytes."""


@dataclass(frozen=True)
class Network:
    """How fast clients are connected: one training takes download/down + upload/up + 2·latency.

    Parameters
    ----------
    up, down
        The median client's bandwidth, in bits per second.
    latency
        Seconds for each of a training's two transfers, whatever their size.
    sigma
        Log-standard deviation of the bandwidths over clients. A client that is twice as fast is so both ways.
    """

    up: float
    down: float
    latency: float = 0.0
    sigma: float = 0.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            positive(each.name, value) if each.name in ("up", "down") else number(each.name, value, 0)

    def times(self, num_clients: int, seed: int, upload: float, download: float) -> Floats:
        """Return the seconds that one training's traffic takes, ``(N,)``, given its bytes."""
        seconds = 8 * (number("upload", upload, 0) / self.up + number("download", download, 0) / self.down)
        factors = Stream(seed, "network").at().lognormal(0.0, self.sigma, num_clients)
        with np.errstate(all="ignore"):
            times = seconds / factors + 2 * self.latency
        require(bool(np.isfinite(times).all()), f"{self!r} gives times that are not numbers; use milder parameters.")
        return times


def as_network(given: object) -> Transfers | None:
    """Return the network that a string means; an object is returned as it is.

    A text is like ``up=5e6,down=20e6,latency=0.05``, or ``table:file=devices.csv`` for measured devices.
    """
    if given is None:
        return None
    network = given
    if isinstance(given, str):
        nameless = "=" in given.partition(":")[0]
        network = (
            build("network", Network, parse_options("network", given, given))
            if nameless
            else named("network", given, {"table": DeviceTable})
        )
    fits = callable(getattr(network, "times", None)) and not isinstance(network, type)
    require(fits, f"network must be a string or an object such as fedhist.Network(up=5e6, down=20e6), got {given!r}.")
    return cast(Transfers, network)
