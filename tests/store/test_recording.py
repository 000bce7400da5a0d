from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedhist as fh
from fedhist.store import recording as module
from fedhist.store.arrays import read_arrays, write_arrays
from fedhist.store.recording import FILES, About, Recording, Tape

COMMON: dict[str, Any] = {"k": 3, "rounds": 12, "eval_every": 4}


class Kept(fh.FedAvg):
    """Remembers all it was given, so that a recording can be compared with it, and spoils its argument."""

    seen: ClassVar[list[tuple[Tensor, Tensor, fh.Arrivals]]] = []

    def forward(self, arrivals: fh.Arrivals) -> Tensor:
        uploads = arrivals.deltas.clone()
        update = super().forward(arrivals)
        self.seen.append((uploads, update.clone(), arrivals))
        arrivals.deltas.zero_()
        return update


@pytest.fixture
def seen() -> list[tuple[Tensor, Tensor, fh.Arrivals]]:
    Kept.seen.clear()
    return Kept.seen


def files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


@pytest.mark.parametrize("faults", [None, fh.Faults(nan=0.1, huge=0.1)])
@pytest.mark.parametrize("trainer", ["reference", "threaded", "batched"])
def test_all_uploads_are_recorded(
    task: fh.Task,
    tmp_path: Path,
    seen: list[tuple[Tensor, Tensor, fh.Arrivals]],
    trainer: str,
    faults: fh.Faults | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "STAGED_ROUNDS", 5)  # so that the last part is not a full one
    history = fh.simulate(Kept(), task, **COMMON, trainer=trainer, faults=faults, record=tmp_path)
    kept = Recording(tmp_path)
    assert kept.about.rounds == len(seen) == 12
    for round_, (uploads, update, arrivals) in enumerate(seen, start=1):
        assert torch.equal(kept.uploads(round_), uploads)
        assert torch.equal(kept.update(round_), update)
        assert kept.num_examples(round_).tolist() == arrivals.num_examples.tolist()
    assert np.array_equal(kept.history.clients, history.clients)
    assert np.array_equal(np.load(tmp_path / "uploads.npy"), torch.stack([u for u, _, _ in seen]).numpy())
    model = kept.start.clone()
    for round_ in range(1, 13):
        model -= kept.update(round_)
    assert history.model is not None
    assert torch.equal(model, torch.cat([value.reshape(-1) for value in history.model.values()]))


def test_a_model_in_double_precision(make_task: Callable[..., fh.Task], tmp_path: Path) -> None:
    base = make_task()
    wide = fh.Task(
        nn.Linear(5, 3).double(),
        base.x.double(),
        base.y,
        [base.client(i) for i in range(8)],
        base.x_test.double(),
        base.y_test,
    )
    fh.simulate("fedhist", wide, **COMMON, record=tmp_path)
    assert Recording(tmp_path).uploads(1).dtype == torch.float64
    assert fh.replay(tmp_path, "fedhist").distance.max() == 0


@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 2**-8), ("float16", 2**-10)])
def test_half_the_size(task: fh.Task, tmp_path: Path, dtype: str, error: float) -> None:
    fh.simulate("fedhist", task, **COMMON, record=tmp_path / "full")
    fh.simulate("fedhist", task, **COMMON, record=tmp_path / "half", record_dtype=dtype)
    full, half = Recording(tmp_path / "full"), Recording(tmp_path / "half")
    sizes = [[(tmp_path / part / name).stat().st_size for name in FILES[:3]] for part in ("half", "full")]
    uploads, examples, updates = ((a - 128) / (b - 128) for a, b in zip(*sizes, strict=True))
    assert (uploads, examples, updates) == (0.5, 1, 0.5)
    for round_ in (1, 7, 12):
        a, b = full.uploads(round_), half.uploads(round_)
        assert b.dtype == torch.float32 and not torch.equal(a, b)
        assert bool(((a - b).abs() <= error * a.abs() + 1e-7).all())


@pytest.mark.parametrize("trainer", ["threaded", "batched"])
@pytest.mark.parametrize("stop", [3, 5, 11, 12])
def test_a_resumed_run_ends_with_the_same_recording(
    task: fh.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer: str, stop: int
) -> None:
    monkeypatch.setattr(module, "STAGED_ROUNDS", 4)
    fh.simulate("fedhist", task, **COMMON, trainer=trainer, record=tmp_path / "whole")

    def dying(round_: int, histories: Sequence[fh.History]) -> None:
        if round_ == stop:
            raise KeyboardInterrupt

    rest = {
        **COMMON,
        "trainer": trainer,
        "checkpoint": tmp_path / "state",
        "record": tmp_path / "a",
        "checkpoint_every": 0,
    }
    with pytest.raises(KeyboardInterrupt):
        fh.simulate("fedhist", task, **rest, on_round=dying)
    with (tmp_path / "a" / "uploads.npy").open("ab") as file:
        file.write(b"what was written after the last checkpoint, or half of it")
    fh.simulate("fedhist", task, **rest)
    assert files(tmp_path / "a") == files(tmp_path / "whole")
    with (tmp_path / "a" / "uploads.npy").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(fh.FedHistError, match=r"uploads.npy is truncated: it ends before round 12"):
        fh.simulate("fedhist", task, **rest)


@pytest.mark.parametrize("trainer", ["threaded", "batched"])
def test_a_run_with_rejected_uploads_is_recorded(
    make_task: Callable[..., fh.Task], tmp_path: Path, trainer: str
) -> None:
    task = make_task()
    task.x[task.client(0)] = torch.nan  # one client's data are broken
    history = fh.simulate("fedavg", task, **COMMON, trainer=trainer, record=tmp_path)
    assert any(event["event"] == "rejected" for event in history.events)
    assert fh.replay(tmp_path, "fedavg").distance.max() == 0


def test_a_comparison_is_recorded_run_by_run(task: fh.Task, tmp_path: Path) -> None:
    runs = fh.compare(["fedavg", "fedhist"], task, **COMMON, seeds=2, record=tmp_path)
    for history in runs:
        kept = Recording(tmp_path / history.name)
        assert (kept.about.method, kept.about.seed) == (history.method, history.seed)


def test_what_cannot_be_recorded(task: fh.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(fh.InvalidInput, match="record_dtype must be 'float32', 'float16' or 'bfloat16', got 'int8'"):
        fh.simulate("fedavg", task, **COMMON, record=tmp_path, record_dtype="int8")
    fh.simulate("fedavg", task, **COMMON, record=tmp_path / "a")
    with pytest.raises(fh.InvalidInput, match="holds a recording already"):
        fh.simulate("fedavg", task, **COMMON, record=tmp_path / "a")
    with pytest.raises(fh.InvalidInput, match="the same folder for several trials"):
        fh.simulate_many([fh.Trial(name, task, k=2, rounds=2, record=tmp_path / "b") for name in ("refl", "fedavg")])
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(fh.InvalidInput, match=r"the recording needs 14.8 KB and .* has 1.0 KB free; record fewer"):
        fh.simulate("fedavg", task, **COMMON, record=tmp_path / "d" / "e")
    assert not (tmp_path / "d").exists()


def test_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "updates.npy").symlink_to("/dev/full")
    about = About(12, 3, 75, 8, "float32", "float32", server_lr=1.0, method="FedAvg", seed=0)
    tape = Tape(tmp_path, about, torch.zeros(75))
    with pytest.raises(fh.FedHistError, match="the recording in .* cannot be written: No space left on device"):
        tape.begin(0)
        tape.write(1, flush=True)
    tape.close()


def test_damaged_recordings(task: fh.Task, tmp_path: Path) -> None:
    fh.simulate("fedavg", task, **COMMON, record=tmp_path / "good")

    def damaged(name: str, change: Callable[[bytes], bytes]) -> Path:
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        file = tmp_path / "bad" / name
        file.write_bytes(change(file.read_bytes()))
        return tmp_path / "bad"

    wrong = {
        "uploads.npy is truncated": ("uploads.npy", lambda b: b[:-1]),
        "updates.npy does not match the recording's description": ("updates.npy", lambda b: b[:40] + b"x" + b[41:]),
        "recording.npz cannot be read: its content is damaged": ("recording.npz", lambda b: b[:-30]),
        "recording.npz cannot be read: it does not describe a recording": (
            "recording.npz",
            lambda b: b.replace(b"start.npy", b"stark.npy"),
        ),
        "does not hold a complete run": ("arrivals.npz", lambda b: b""),
    }
    for sentence, (name, change) in wrong.items():
        with pytest.raises(fh.FedHistError, match=sentence):
            Recording(damaged(name, change))
    with pytest.raises(fh.FedHistError, match="holds no recording; there is one in .*/bad"):
        Recording(tmp_path)
    with pytest.raises(fh.FedHistError, match="holds no recording; make one with --record"):
        Recording(tmp_path / "nowhere")
    fh.simulate("fedavg", task, k=2, rounds=12).save(damaged("uploads.npy", lambda b: b))
    with pytest.raises(fh.FedHistError, match="the arrivals in .* are not those of its recording"):
        Recording(tmp_path / "bad")


def test_what_was_changed_after_it_was_written_is_noticed(task: fh.Task, tmp_path: Path) -> None:
    """Of any file, also of the description and of the first model, with its own checksum made right again."""
    fh.simulate("fedavg", task, **COMMON, record=tmp_path / "good")
    good = Recording(tmp_path / "good")

    def changed(name: str, change: Callable[[Path], None]) -> Recording:
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        change(tmp_path / "bad" / name)
        return Recording(tmp_path / "bad")

    def flip(path: Path, at: int = -1) -> None:
        content = bytearray(path.read_bytes())
        content[at] ^= 1
        path.write_bytes(content)

    for name, read in {"uploads.npy": "uploads", "updates.npy": "update", "examples.npy": "num_examples"}.items():
        bad = changed(name, flip)
        assert torch.equal(getattr(bad, read)(11), getattr(good, read)(11))
        with pytest.raises(fh.FedHistError, match=f"was changed after it was written: .* of round 12 in {name} does"):
            getattr(bad, read)(12)
    with pytest.raises(fh.FedHistError, match="changed after it was written"):
        changed("checksums.npy", flip).update(12)
    for value in ({"start": good.start.numpy() + 1}, {"about": described(good, server_lr=2.0)}):
        bad = changed("recording.npz", lambda path, value=value: write_arrays(path, **(read_arrays(path) | value)))
        with pytest.raises(fh.FedHistError, match="changed after it was written"):
            bad.uploads(1)
    with pytest.raises(fh.FedHistError, match=r"checksums.npy cannot be read: No such file"):
        changed("checksums.npy", Path.unlink)


def described(recording: Recording, **changes: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(asdict(recording.about) | changes).encode(), np.uint8)


@pytest.mark.parametrize(
    "changes",
    [
        {"rounds": 0},
        {"rounds": 1 << 40},
        {"k": 9},
        {"num_clients": 10**9},
        {"num_params": -1},
        {"num_params": 1},
        {"dtype": "uint32"},
        {"model_dtype": "int8"},
        {"seed": -1},
        {"seed": 1 << 63},
        {"method": "x" * 20_000},
    ],
)
def test_forged_descriptions(task: fh.Task, tmp_path: Path, changes: dict[str, Any]) -> None:
    fh.simulate("fedavg", task, **COMMON, record=tmp_path)
    about = described(Recording(tmp_path), **changes)
    write_arrays(tmp_path / "recording.npz", **(read_arrays(tmp_path / "recording.npz") | {"about": about}))
    with pytest.raises(fh.FedHistError, match="does not describe a recording"):
        Recording(tmp_path)
