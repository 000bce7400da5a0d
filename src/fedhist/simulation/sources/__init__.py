"""Where arrivals come from: clients one by one, all clients at once, or a recording; a network is in fedhist.flower."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from fedhist.clients.scores import Score
from fedhist.data.examples import TestSet
from fedhist.data.task import Task
from fedhist.simulation.server import Server
from fedhist.strategies.arrivals import Arrivals

Close = Callable[[Server, Arrivals], object]
"""What is done with a round that is delivered; ``Server.close`` wherever it matters."""


class Source(Protocol):
    """Delivers the uploads that close rounds."""

    def next(self) -> Iterator[tuple[Server, Arrivals]]:
        """Deliver the next round of each server, which closes it before it asks for the next one's."""

    def state(self) -> Sequence[dict[str, Tensor]]:
        """Return, for each server, what the rounds to come depend on besides the server itself."""

    def restore(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Put back what :meth:`state` returned; the servers have been restored before."""

    def close(self) -> None:
        """Release threads, memory and connections."""


class Simulated(Source, Protocol):
    """A source whose clients are trained here."""

    def play(self, close: Close) -> None:
        """Take a round of all servers: deliver, and let them close."""

    def look(self) -> dict[int, int]:
        """Copy results from the device; return the servers that received a bad upload, and in which round.

        They have to leave, since here rounds are closed before uploads are screened.
        """

    def evaluate(self, choose: Callable[[Task], TestSet | None]) -> list[Score | None]:
        """Evaluate the servers' models on the test set that is chosen for each task; None where there is none."""
