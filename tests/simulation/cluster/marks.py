"""What the tests of a cluster have in common."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

import fedhist as fh
from fedhist.simulation.checkpoint import stored_in

LOCAL = fh.LocalSGD(lr=0.1, steps=2, batch_size=8)
LONG = 120.0
"""Seconds to wait for something on a machine that is busy."""


def same(a: fh.History, b: fh.History) -> bool:
    assert a.model is not None
    assert b.model is not None
    equal = all(torch.equal(a.model[name], b.model[name]) for name in a.model)
    settings = [{**each.setting, "record": None} for each in (a, b)]
    return equal and (a.seed, a.loss, a.accuracy, settings[0]) == (b.seed, b.loss, b.accuracy, settings[1])


def all_same(here: Sequence[fh.History], there: Sequence[fh.History]) -> bool:
    return all(same(a, b) for a, b in zip(here, there, strict=True))


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)


class Marking(fh.FedAvg):
    """Notes the process of every round that it takes; in the fifth it waits for a file `gate`, if it has one."""

    def __init__(self, marks: str, gate: str = "") -> None:
        super().__init__()
        self.marks, self.gate = marks, gate

    def weights(self, arrivals: fh.Arrivals) -> Tensor:
        self.mark()
        if self.gate and len(marks_of(Path(self.marks))) == 5:
            wait_for(Path(self.gate).exists)
        return super().weights(arrivals)

    def mark(self) -> None:
        with Path(self.marks).open("a") as file:
            file.write(f"{os.getpid()} {os.environ.get('CUDA_VISIBLE_DEVICES')}\n")


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def marks_of(file: Path) -> list[int]:
    return [int(line.split()[0]) for line in file.read_text().splitlines()] if file.exists() else []


def saved_in(folder: Path) -> list[int]:
    """Return the rounds of all checkpoints in a folder."""
    return [stored_in(file)[1]["round"] for file in sorted(folder.glob("runs-*.safetensors"))]
