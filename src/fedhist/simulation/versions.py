"""The model versions that clients at work were sent, kept as long as somebody needs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedhist.world.clock import Schedule


class Versions:
    """Models by version, each kept while clients are at work on it."""

    def __init__(self, holders: Mapping[int, int]) -> None:
        self.holders = Counter(holders)
        """How many clients are at work on each version, or will be sent it."""
        self._models: dict[int, Tensor] = {}

    def __getitem__(self, version: int) -> Tensor:
        return self._models[version]

    def publish(self, version: int, model: Tensor) -> None:
        """Keep a copy of the current model, if anybody is sent it."""
        if self.holders[version] > 0 and version not in self._models:
            self._models[version] = model.clone()

    def release(self, version: int) -> None:
        """Take note that one client less is at work on a version."""
        self.holders[version] -= 1
        if self.holders[version] == 0:
            self._models.pop(version, None)

    def state(self) -> dict[str, Tensor]:
        """Return the versions and their models."""
        held = sorted(self._models)
        models = [self._models[version] for version in held]
        return {"held": torch.tensor(held, dtype=torch.int64), "versions": torch.stack(models) if models else EMPTY}

    def restore(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Put back what :meth:`state` returned."""
        self._models = dict(zip(state["held"].tolist(), state["versions"].to(device), strict=True))


EMPTY = torch.empty((0, 0))


class LastModels:
    """Each client's own last local model, for objectives that look at it."""

    def __init__(self) -> None:
        self._models: dict[int, Tensor] = {}

    def get(self, client: int) -> Tensor | None:
        """Return a client's last model; None if it has not trained before."""
        return self._models.get(client)

    def keep(self, client: int, model: Tensor) -> None:
        """Keep the model a client ended with."""
        self._models[client] = model

    def state(self) -> dict[str, Tensor]:
        """Return the clients and their models."""
        models = list(self._models.values())
        clients = torch.tensor(list(self._models), dtype=torch.int64)
        return {"previous.clients": clients, "previous": torch.stack(models) if models else EMPTY}

    def restore(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Put back what :meth:`state` returned."""
        models = state["previous"].to(device)
        self._models = dict(zip(state["previous.clients"].tolist(), models, strict=True))


@dataclass(frozen=True)
class VersionPlan:
    """Where each version is stored, where the schedule is known beforehand.

    A run keeps `num_slots` vectors, as many as versions are ever held at once, however many clients
    there are.
    """

    slots: NDArray[np.int64]
    """``(rounds + 2,)``: the slot of each version, -1 for one that nobody uploads from."""
    num_slots: int
    last_use: NDArray[np.int64]
    """``(rounds + 2,)``: the last round that needs each version, beyond the last if it is still held then; else 0."""

    def held_after(self, round_: int) -> NDArray[np.int64]:
        """Return the versions up to `round_` that somebody is at work on after it, in order."""
        return np.flatnonzero(self.last_use[: round_ + 1] > round_)


def holders_of(rounds: int, k: int, busy: int) -> NDArray[np.int64]:
    """Return how many clients a clock sends each version to, ``(rounds + 2,)``."""
    holders = np.full(rounds + 2, k)
    holders[:2] = 0, busy
    return holders


def plan_versions(schedule: Schedule, holders: NDArray[np.int64] | None = None) -> VersionPlan:
    """Assign slots so that a version's slot is free again when nobody is at work on it any more.

    `holders` says how many clients are sent each version; without it, as many as upload from it.
    """
    rounds = schedule.rounds
    last_use = np.zeros(rounds + 2, np.int64)
    # Rounds go up, and of several values for one version the last stays.
    last_use[schedule.versions] = np.arange(1, rounds + 1)[:, None]
    if holders is not None:
        late = np.bincount(schedule.versions.ravel(), minlength=rounds + 2) < holders
        last_use[:-1][late[:-1]] = rounds + 1
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


def uploads_by_version(versions: Iterable[int] | NDArray[np.int64]) -> Counter[int]:
    """Return how many of some uploads there are of each version."""
    return Counter(np.asarray(versions).ravel().tolist())
