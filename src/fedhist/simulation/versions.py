"""The models that clients at work hold, kept as long as they are needed."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedhist.errors import require
from fedhist.world.schedule import Schedule

EMPTY = torch.empty((0, 0))


class Models(dict[int, Tensor]):
    """Models by a number: a version's, or that of the client whose own last model it is."""

    def state(self) -> tuple[Tensor, Tensor]:
        """Return the numbers and the models."""
        numbers = torch.tensor(list(self), dtype=torch.int64)
        return numbers, torch.stack(list(self.values())) if self else EMPTY

    def restore(self, numbers: Tensor, models: Tensor, like: Tensor, known: Collection[int]) -> None:
        """Put back what :meth:`state` returned: models like one there is, some of the numbers that are known."""
        check_models(numbers, models, like, known)
        # Each in memory of its own, as before: the sums of some kernels depend on where a vector begins.
        self.update((n, model.clone()) for n, model in zip(numbers.tolist(), models.to(like.device), strict=True))


def check_models(numbers: Tensor, models: Tensor, like: Tensor, known: Collection[int]) -> None:
    """Raise unless there is a model like the given one for each of some numbers, all of which are known."""
    form = (
        numbers.ndim == 1 and numbers.dtype == torch.int64 and len({*numbers.tolist()}) == len(numbers) == len(models)
    )
    require(form and all(number in known for number in numbers.tolist()), "it holds models of others than its clients")
    fits = len(models) == 0 or (models[0].shape, models.dtype) == (like.shape, like.dtype)
    require(fits, f"its clients' models are {models.dtype} of shape {tuple(models.shape)}")


def check_held(numbers: Tensor, held: Collection[int]) -> None:
    """Raise unless these are the versions that clients are at work on."""
    require(numbers.tolist() == [*held], "it does not hold the versions that its clients are at work on")


class Versions(Models):
    """Models by version, each kept while clients are at work on it."""

    def publish(self, version: int, model: Tensor) -> None:
        """Keep a copy of the current model."""
        if version not in self:
            self[version] = model.clone()

    def keep(self, versions: Collection[int]) -> None:
        """Release all versions but these."""
        for version in self.keys() - {*versions}:
            del self[version]

    def restore(self, numbers: Tensor, models: Tensor, like: Tensor, known: Collection[int]) -> None:
        """Put back what :meth:`state` returned: all that are known."""
        check_held(numbers, known)
        super().restore(numbers, models, like, known)


@dataclass(frozen=True)
class VersionPlan:
    """Where each version is stored, if the schedule is known beforehand.

    A run keeps `num_slots` vectors, as many as versions are ever held at once, however many clients there are.
    """

    slots: NDArray[np.int64]
    """``(rounds + 2,)``: the slot of each version, -1 for one that no client uploads from."""
    num_slots: int
    last_use: NDArray[np.int64]
    """``(rounds + 2,)``: the last round that needs each version, beyond the last if it is still held then; else 0."""

    def held_after(self, round_: int) -> NDArray[np.int64]:
        """Return the versions up to `round_` that clients are at work on after it, in order."""
        return np.flatnonzero(self.last_use[: round_ + 1] > round_)


def plan_versions(schedule: Schedule, busy: int | None = None) -> VersionPlan:
    """Assign slots so that a version's slot is free again when no client is at work on it any more.

    `busy` clients are sent the first version and K each of the others, where the schedule does not know better; None if
    those who upload are all there are.
    """
    rounds = schedule.rounds
    last_use = np.zeros(rounds + 2, np.int64)
    if schedule.last_use is not None:
        last_use[:] = schedule.last_use
    else:  # Rounds go up, and of several values for one version the last stays.
        last_use[schedule.versions] = np.arange(1, rounds + 1)[:, None]
        last_use[0] = 0  # nobody's
    if schedule.last_use is None and busy is not None:
        uploads = np.bincount(schedule.versions.ravel(), minlength=rounds + 2)
        sent = np.where(np.arange(rounds + 2) == 1, busy, schedule.k)
        last_use[1:-1][(uploads < sent)[1:-1]] = rounds + 1
    stored = np.flatnonzero(last_use)
    expiring = stored[np.argsort(last_use[stored], kind="stable")]
    expired = np.searchsorted(last_use[expiring], stored)  # how many are gone when each is stored
    slots = [-1] * (rounds + 2)
    free: list[int] = []
    count = gone = 0
    leaving = expiring.tolist()
    for version, until in zip(stored.tolist(), expired.tolist(), strict=True):
        free.extend(slots[old] for old in leaving[gone:until])
        gone = until
        if not free:
            free.append(count)
            count += 1
        slots[version] = free.pop()
    return VersionPlan(np.array(slots), count, last_use)
