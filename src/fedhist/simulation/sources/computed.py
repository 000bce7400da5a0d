"""Uploads that are being computed."""

from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor

from fedhist.clients.job import Job, Trainer


@dataclass
class Computed:
    """An upload that is being computed, or was."""

    row: Tensor
    future: Future[None] | None = None

    def ready(self) -> Tensor:
        """Return it, once it is there."""
        if self.future is not None:
            self.future.result()
        return self.row


Work = list[tuple[int, Job, Computed]]
"""Uploads to be computed: 0 for those of the round under way, 1 for the next one's."""


def compute(trainer: Trainer, work: Work) -> None:
    """Let a trainer begin; what the round under way waits for goes first."""
    work.sort(key=lambda each: each[0])
    futures = trainer.start([job for _, job, _ in work], [upload.row for _, _, upload in work])
    for (_, _, upload), future in zip(work, futures, strict=False):  # none where all is done already
        upload.future = future
