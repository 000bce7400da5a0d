"""What travels between server and clients, as one vector each way, and where its parts lie."""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from fedhist.clients.objectives import Objective, Trained, outcome, uses_mail
from fedhist.data.layout import Layout


class Parcel:
    """The parts of the vectors that a method's clients are sent and send.

    A client is sent the model with its statistics, and mail where the method has some. It sends how far it has moved,
    its statistics, mail, and, for itself to find again, what it keeps until its next training.
    """

    def __init__(self, layout: Layout, objective: Objective) -> None:
        self.layout, self.objective = layout, objective
        size, width = layout.size, layout.width
        mail = size if uses_mail(objective) else 0
        self.mail = slice(width, width + mail)
        self.version_width = width + mail
        """How long a version is, as it is sent."""
        self.kept = slice(width + mail, width + mail + (size if objective.uses_previous else 0))
        self.row_width = self.kept.stop
        """How long an upload is, and what is kept with it."""
        self.plain = self.row_width == size
        """Whether nothing but the model's parameters travels."""

    def first_version(self, model: Tensor) -> Tensor:
        """Return a model as it is sent, with room for mail."""
        return torch.cat([model, model.new_zeros(self.version_width - len(model))])

    def write(self, out: Tensor, version: Tensor, local: Tensor, work: Callable[[], Trained]) -> None:
        """Write what a client sends, or what many send, given the version they were sent and their local models."""
        self.layout.upload(version, local, out)
        if self.row_width > self.layout.width:
            kept, mail = outcome(self.objective, work())
            if self.objective.uses_previous:
                out[..., self.kept] = kept
            if mail is not None and self.mail.stop > self.mail.start:
                out[..., self.mail] = mail

    def flaw(self, rows: Tensor) -> Tensor | float:
        """Return 0 for uploads whose statistics and mail are finite, and NaN for others."""
        rest = rows[..., self.layout.size : self.kept.start]
        return (rest * 0).sum(dim=-1) if rest.shape[-1] else 0.0

    def mail_of(self, version: Tensor) -> Tensor | None:
        """Return what was sent along with a version."""
        return version[..., self.mail] if self.mail.stop > self.mail.start else None

    def parts(self, rows: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the parts of uploads: how far clients moved, their statistics, and their mail."""
        size, width = self.layout.size, self.layout.width
        moved = rows if self.plain else rows[..., :size]
        return moved, rows[..., size:width] if width > size else None, self.mail_of(rows)


@lru_cache(maxsize=64)
def _known(layout: Layout, objective: Objective) -> Parcel:
    return Parcel(layout, objective)


def parcel_of(layout: Layout, objective: Objective) -> Parcel:
    """Return where the parts of a method's vectors lie."""
    try:
        return _known(layout, objective)  # type: ignore[arg-type]
    except TypeError:  # an objective of the user's own that cannot be hashed
        return Parcel(layout, objective)
