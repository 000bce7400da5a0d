"""A recording as a source: the uploads of a run once more."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedhist.simulation.server import Server
from fedhist.simulation.versions import Versions
from fedhist.store.recording import Recording
from fedhist.store.tables import COSTS
from fedhist.strategies.arrivals import Arrivals


class RecordedUploads:
    """Delivers the uploads of a recording to a server."""

    def __init__(self, recording: Recording, server: Server) -> None:
        self.recording, self.server = recording, server
        self.recorded = recording.start.clone()
        """The recorded server's model, of which clients had received the versions that their uploads started from."""
        staleness = recording.history.staleness
        self._sent = np.arange(1, len(staleness) + 1)[:, None] - staleness + 1
        self._last_use = np.zeros(len(staleness) + 2, np.int64)
        self._last_use[self._sent] = np.arange(1, len(staleness) + 1)[:, None]
        self._versions = Versions()

    def next(self) -> Iterator[tuple[Server, Arrivals]]:
        """Deliver the next round, as the recorded server saw it."""
        history, row = self.recording.history, self.server.round
        staleness, clients = (torch.tensor(table[row]) for table in (history.staleness, history.clients))
        uploads, sizes = self.recording.uploads(row + 1), self.recording.num_examples(row + 1)
        if self._last_use[row + 1] > 0:
            self._versions.publish(row + 1, self.recorded)
        held = [self._versions[version] for version in self._sent[row].tolist()]
        arrivals = Arrivals(uploads, staleness, clients, sizes, validate=False, received_from=lambda: torch.stack(held))
        yield self.server, arrivals
        self._versions.keep([version for version in self._versions if self._last_use[version] > row + 1])
        costs = {name: getattr(history, name)[row] for name in COSTS}
        self.recorded.sub_(self.recording.update(row + 1), alpha=self.recording.about.server_lr)
        self.server.keep_round(history.clients[row], history.staleness[row], history.arrived[row], costs)

    def state(self) -> list[dict[str, Tensor]]:
        """Return nothing: the server's round says where the recording is."""
        return [{}]

    def restore(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Nothing to put back."""

    def close(self) -> None:
        """Nothing to release."""
