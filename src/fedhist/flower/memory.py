"""What a K-async server will need in memory, said before the first round."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from fedhist.errors import InvalidInput
from fedhist.flower.options import Options
from fedhist.flower.source import AT_ONCE
from fedhist.flower.wire import Wire
from fedhist.simulation.plan import available
from fedhist.store.recording import in_units
from fedhist.strategies import FedHist, Strategy
from fedhist.strategies.memory import buffer_bytes, smaller

TYPICAL_SPREAD = 5
"""How many times N/K rounds the slowest of N clients takes where some are a few times as slow as others."""


def planned(options: Options, method: Strategy, wire: Wire, expected: int, room: int) -> Iterator[str]:
    """Return what the server will need, line by line; raise if the strategy's memory alone is more than is free.

    `method` is the strategy as it will be set up.
    """
    kind = getattr(torch, wire.dtype)
    model = wire.num_params * kind.itemsize
    size_of = partial(buffer_bytes, num_clients=room, k=options.k, num_params=wire.num_params, dtype=kind)
    strategy = size_of(method)
    versions = options.max_staleness or min(expected, TYPICAL_SPREAD * -(-expected // options.k))
    uploads = options.k + max(4 * options.k, AT_ONCE)
    parts = {
        f"{options.method.name}, for {room:,} clients": strategy,
        f"{'at most' if options.max_staleness else 'about'} {versions:,} versions that nodes work on": versions * model,
        f"up to {uploads:,} uploads that wait": uploads * model,
        "the model as it travels": 3 * model,
    }
    there = available(torch.device("cpu"))
    needed = sum(parts.values())
    less = smaller(method, size_of, there / 2 - (needed - strategy)) or smaller(method, size_of, there)
    if strategy > there:
        what = f"{options.method.name} would keep {in_units(strategy)} for {room:,} clients"
        raise InvalidInput(f"{what}, and {in_units(there)} of memory are free; {_remedies(options, less)}.")
    yield f"memory: about {in_units(needed)} of the {in_units(there)} that are free"
    for what, size in parts.items():
        if size:
            yield f"\t├──> {in_units(size)}: {what}"
    if options.checkpoint is not None:
        yield f"\t└──> on disk: {in_units(strategy + model)} a checkpoint, and at most as much again of changes"
    if needed > there / 2:
        yield f"this is more than half of that: {_remedies(options, less)}"


def _remedies(options: Options, less: tuple[str, int] | None) -> str:
    """Return how the method could do with less."""
    found = [f"{less[0]} takes {in_units(less[1])}"] if less is not None else []
    if any(isinstance(part, FedHist) for part in options.method.strategy.modules()):
        found += ["a smaller h"]
    if options.num_clients is None:
        found += ["num_clients says how many there are"]
    if options.max_staleness is None:
        found += ["max_staleness bounds how many versions are kept"]
    return "to need less, " + ", ".join(found) if found else "take a smaller model or a method with less memory"
