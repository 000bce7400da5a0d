"""A snapshot and a journal: what was written last is read, whatever has happened to the writer."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedhist as fh
from fedhist.store import journal, snapshot
from fedhist.store.journal import Journal, journal_of, read

KIND, GROWING = "a test, 1", ("events", "rows.")


class Model:
    """Something with state of all kinds, in which a step changes a little."""

    def __init__(self) -> None:
        self.rng, self.step = np.random.default_rng(0), 0
        self.cache, self.model = torch.zeros(50, 8), torch.zeros(8)
        self.table: list[int] = []
        self.events: list[str] = []

    def advance(self) -> Tensor:
        """Take a step and return the rows of the cache that it wrote; some are named twice."""
        self.step += 1
        rows = torch.from_numpy(self.rng.integers(0, 50, 3))
        self.cache[rows] = float(self.step)
        self.model += 1
        self.table.append(self.step)
        self.events += [f"event {self.step}"] * (self.step % 3)
        return rows

    def tensors(self) -> dict[str, Tensor]:
        return {"cache": self.cache, "model": self.model, "rows.table": torch.tensor(self.table, dtype=torch.int64),
                "number": torch.tensor(float(self.step))}  # fmt: skip

    def state(self) -> dict[str, Any]:
        return {"round": self.step, "about": "the same", "events": self.events}


def same(path: Path, model: Model) -> None:
    tensors, state = read(path, [KIND], GROWING)
    assert state.pop(journal.STEP) > 0
    assert state == model.state()
    assert tensors.keys() == model.tensors().keys()
    for name, tensor in model.tensors().items():
        assert torch.equal(tensors[name], tensor), name


def write(own: Journal, model: Model, rows: Tensor) -> None:
    own.write(model.tensors(), model.state(), {"cache": rows})
    own.wait()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.safetensors"


def test_every_step_is_read_as_it_was_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "SMALLEST", 4000)  # so that it is outgrown a few times
    model, own, sizes = Model(), Journal(path, KIND, GROWING), []
    for _ in range(40):
        write(own, model, model.advance())
        same(path, model)
        sizes.append(journal_of(path).stat().st_size if journal_of(path).exists() else 0)
    own.close()
    assert sizes.count(0) >= 2  # a new snapshot took the journal's place
    assert max(sizes) > 3000


def test_a_step_writes_what_has_changed(path: Path) -> None:
    """A row is 32 bytes, the cache 1,600."""
    model, own = Model(), Journal(path, KIND, GROWING)
    for _ in range(10):
        write(own, model, model.advance())
    first = journal_of(path).stat().st_size
    write(own, model, model.advance())
    assert 3 * 32 < journal_of(path).stat().st_size - first < 1600
    own.close()


def test_only_the_owner_may_read(path: Path) -> None:
    model, own = Model(), Journal(path, KIND, GROWING)
    for _ in range(2):
        write(own, model, model.advance())
    own.close()
    assert {file.stat().st_mode & 0o777 for file in (path, journal_of(path))} == {0o600}


@pytest.mark.parametrize("kept", [0, 1, 20, 100, -1])
def test_a_record_that_was_cut_off_never_was(path: Path, kept: int) -> None:
    model, own = Model(), Journal(path, KIND, GROWING)
    for _ in range(5):
        write(own, model, model.advance())
    before = journal_of(path).stat().st_size
    tensors = {name: tensor.clone() for name, tensor in model.tensors().items()}
    write(own, model, model.advance())
    own.close()
    os.truncate(journal_of(path), before + kept if kept >= 0 else journal_of(path).stat().st_size - 1)
    found, state = read(path, [KIND], GROWING)
    assert state["round"] == 5
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    again = Journal(path, KIND, GROWING)  # whoever goes on begins with a snapshot
    write(again, model, model.advance())
    again.close()
    same(path, model)
    assert not journal_of(path).exists()


def test_the_last_record_with_garbage_in_it_never_was(path: Path) -> None:
    """A power failure may leave the length of a file and not its content."""
    model, own = Model(), Journal(path, KIND, GROWING)
    for _ in range(4):
        write(own, model, model.advance())
    own.close()
    content = journal_of(path).read_bytes()
    journal_of(path).write_bytes(content[:-50] + bytes(50))
    assert read(path, [KIND], GROWING)[1]["round"] == 3


def test_damage_in_the_middle_is_told(path: Path) -> None:
    model, own = Model(), Journal(path, KIND, GROWING)
    for _ in range(4):
        write(own, model, model.advance())
    own.close()
    content = bytearray(journal_of(path).read_bytes())
    content[100] ^= 1
    journal_of(path).write_bytes(content)
    with pytest.raises(
        fh.FedHistError, match=r"state.journal does not fit state.safetensors, or it is damaged: its ch"
    ):
        read(path, [KIND], GROWING)


def test_a_journal_of_another_snapshot_is_told(path: Path) -> None:
    model, own = Model(), Journal(path, KIND, GROWING)
    write(own, model, model.advance())
    old = path.read_bytes()
    for _ in range(3):
        write(own, model, model.advance())
    records = journal_of(path).read_bytes()
    own.close()
    first = len(records) // 3
    journal_of(path).write_bytes(records[first:])
    path.write_bytes(old)
    with pytest.raises(fh.FedHistError, match="damaged"):
        read(path, [KIND], GROWING)


def test_a_kill_between_the_snapshot_and_the_end_of_its_journal(path: Path) -> None:
    model, own = Model(), Journal(path, KIND, GROWING)
    for _ in range(4):
        write(own, model, model.advance())
    records = journal_of(path).read_bytes()
    snapshot.write(path, KIND, model.tensors(), model.state() | {journal.STEP: 4})
    own.close()
    journal_of(path).write_bytes(records)
    assert read(path, [KIND], GROWING)[1]["round"] == 4
    same(path, model)


@pytest.mark.parametrize("snapshot_is_there", [True, False])
def test_a_journal_left_behind_is_not_taken_for_that_of_a_later_writer(
    path: Path, snapshot_is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server is resumed, writes its first snapshot, and is killed before it has removed the journal of the last."""
    model, first = Model(), Journal(path, KIND, GROWING)
    for _ in range(4):
        write(first, model, model.advance())
    first.close()
    second = Journal(path, KIND, GROWING)
    if snapshot_is_there:
        second.step = read(path, [KIND], GROWING)[1][journal.STEP]
    else:  # somebody has removed it, and left the journal
        path.unlink()
    own = snapshot.write

    def killed_after(*args: Any, **more: Any) -> None:
        own(*args, **more)
        raise OSError(errno.EIO, "killed")

    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "write", killed_after)
        with pytest.raises(OSError, match="killed"):
            write(second, model, model.advance())
    second.close()
    same(path, model)


def test_after_a_full_disk_nothing_is_missing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, own = Model(), Journal(path, KIND, GROWING)
    for _ in range(3):
        write(own, model, model.advance())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write(own, model, model.advance())
        assert read(path, [KIND], GROWING)[1]["round"] == 3
    write(own, model, model.advance())
    own.close()
    same(path, model)


def test_it_writes_beside_the_caller_and_waits_for_the_step_before(path: Path) -> None:
    model, own = Model(), Journal(path, KIND, GROWING)
    given = {name: tensor.clone() for name, tensor in model.tensors().items()}  # tensors must stay as they are
    own.write(given, model.state(), {})
    rows = model.advance()  # lists may grow meanwhile
    own.write(model.tensors(), model.state(), {"cache": rows})
    own.close()
    assert read(path, [KIND], GROWING)[1]["round"] == 1
    same(path, model)


def test_other_kinds_are_refused(path: Path) -> None:
    model, own = Model(), Journal(path, KIND, GROWING)
    write(own, model, model.advance())
    own.close()
    with pytest.raises(fh.FedHistError, match=r"is not a test, 2\."):
        read(path, ["a test, 2"], GROWING)
    same(path, model)
