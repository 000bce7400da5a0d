"""A recording as a source: the uploads of a run once more."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fedhist.simulation.server import Server
from fedhist.store.recording import Recording
from fedhist.strategies.arrivals import Arrivals


class RecordedUploads:
    """Delivers the uploads of a recording to a server."""

    def __init__(self, recording: Recording, server: Server) -> None:
        self.recording, self.server = recording, server

    def next(self) -> Iterator[tuple[Server, Arrivals]]:
        """Deliver the next round, as the recorded server saw it."""
        history, row = self.recording.history, self.server.round
        staleness, clients = (torch.tensor(table[row]) for table in (history.staleness, history.clients))
        uploads, sizes = self.recording.uploads(row + 1), self.recording.num_examples(row + 1)
        arrivals = Arrivals(uploads, staleness, clients, sizes, validate=False)
        yield self.server, arrivals
        self.server.keep_round(history.clients[row], history.staleness[row], history.arrived[row])

    def state(self) -> list[dict[str, Tensor]]:
        """Return nothing: the server's round says where the recording is."""
        return [{}]

    def restore(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Nothing to put back."""

    def close(self) -> None:
        """Nothing to release."""
