"""What a K-async server will need in memory, said before the first round."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fedhist.errors import InvalidInput
from fedhist.flower.options import Options
from fedhist.flower.source import AT_ONCE
from fedhist.flower.wire import Wire
from fedhist.simulation.plan import available
from fedhist.store.recording import in_units
from fedhist.strategies import FedHist, Strategy
from fedhist.strategies.cache import Cached
from fedhist.strategies.memory import buffer_bytes

TYPICAL_SPREAD = 5
"""How many times N/K rounds the slowest of N clients takes where some are a few times as slow as others."""


def planned(options: Options, method: Strategy, wire: Wire, expected: int, room: int) -> Iterator[str]:
    """Return what the server will need, line by line; raise if the strategy's memory alone is more than is free.

    `method` is the strategy as it will be set up.
    """
    kind = getattr(torch, wire.dtype)
    model = wire.num_params * kind.itemsize
    strategy = buffer_bytes(method, room, options.k, wire.num_params, kind)
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
    if strategy > there:
        what = f"{options.method.name} would keep {in_units(strategy)} for {room:,} clients"
        raise InvalidInput(f"{what}, and {in_units(there)} of memory are free; {_remedies(options)}.")
    yield f"memory: about {in_units(needed)} of the {in_units(there)} that are free"
    for what, size in parts.items():
        if size:
            yield f"\t├──> {in_units(size)}: {what}"
    if options.checkpoint is not None:
        yield f"\t└──> on disk: {in_units(strategy + model)} a checkpoint, and at most as much again of changes"
    if needed > there / 2:
        yield f"this is more than half of that: {_remedies(options)}"


def _remedies(options: Options) -> str:
    """Return how the method could do with less."""
    parts = [*options.method.strategy.modules()]
    found = []
    if any(isinstance(part, FedHist) for part in parts):
        found += ["memory_dtype=bfloat16 halves it", "sketch=4096 keeps sketches of past uploads", "a smaller h"]
    if any(isinstance(part, Cached) for part in parts):
        found += ["bits=4 keeps an eighth"]
    if options.num_clients is None:
        found += ["num_clients says how many there are"]
    if options.max_staleness is None:
        found += ["max_staleness bounds how many versions are kept"]
    return "to need less, " + ", ".join(found) if found else "take a smaller model or a method with less memory"
