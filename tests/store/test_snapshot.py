"""Files that hold a state: whole or not at all, and refused with the reason when something is wrong."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fedhist as fh
from fedhist.store import snapshot

KIND = "a snapshot for this test"
TENSORS = {
    "numbers": torch.arange(6.0).reshape(2, 3),
    "halves": torch.tensor([0.5, -2.0], dtype=torch.bfloat16),
    "count": torch.tensor(7),
    "flags": torch.tensor([True, False]),
    "nothing": torch.zeros(0, 4),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "state.safetensors"
    snapshot.write(path, KIND, TENSORS, {"round": 3, "loss": float("inf"), "name": "π"})
    return path


def test_comes_back_as_it_was(file: Path) -> None:
    tensors, state = snapshot.read(file, KIND)
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)
    assert state == {"round": 3, "loss": float("inf"), "name": "π"}
    assert [each.name for each in file.parent.iterdir()] == [file.name]


def test_a_file_of_another_kind(file: Path) -> None:
    with pytest.raises(fh.FedHistError, match=r"state.safetensors is not a cake\.$"):
        snapshot.read(file, "a cake")
    save_file({"a": torch.zeros(3)}, file)
    with pytest.raises(fh.FedHistError, match=r"is not a snapshot for this test\.$"):
        snapshot.read(file, KIND)


@pytest.mark.parametrize("length", [0, 5, 8, 9, 100, -1])
def test_a_truncated_file(file: Path, length: int) -> None:
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(fh.FedHistError, match="state.safetensors is truncated"):
        snapshot.read(file, KIND)


def test_an_edited_file(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(fh.FedHistError, match="was changed after it was written"):
        snapshot.read(file, KIND)


@pytest.mark.parametrize("content", [b"hello, world", b"PK\x03\x04" * 9, json.dumps({"round": 3}).encode()])
def test_a_foreign_file(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(fh.FedHistError, match="is not a snapshot of fedhist"):
        snapshot.read(file, KIND)


def test_a_folder_in_its_place(tmp_path: Path) -> None:
    with pytest.raises(fh.FedHistError, match="cannot be read: Is a directory"):
        snapshot.read(tmp_path, KIND)


def test_a_full_disk_leaves_the_one_before(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        snapshot.write(file, KIND, {}, {"round": 4})
    assert file.read_bytes() == before
    assert [each.name for each in file.parent.iterdir()] == [file.name]
