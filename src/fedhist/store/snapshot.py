"""State in one file, which is there whole or not at all: tensors as safetensors, all else as JSON among them."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedhist.errors import FedHistError, reason
from fedhist.store.files import plain, whole_file

STATE = "json"
"""The tensor that holds what is none: the header of a safetensors file may not grow beyond 100 MB."""


def write(path: Path, kind: str, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Write a snapshot; the one before stays until the new one is complete. May raise an OSError."""
    from safetensors import SafetensorError  # noqa: PLC0415 (not everybody who simulates has it)
    from safetensors.torch import save_file  # noqa: PLC0415

    text = json.dumps(state).encode()
    own = {name: _plain(tensor) for name, tensor in tensors.items()}
    own[STATE] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    try:
        with whole_file(path) as part:
            save_file(own, part, metadata={"kind": kind, "blake2b": _digest(own.items())})
    except SafetensorError as error:  # what the operating system said, wrapped up
        number = re.search(r"os error (\d+)", str(error))
        raise (OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error))) from error


def read(path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a snapshot, or say what is wrong with the file."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415

    try:
        _check_length(path)
        with safe_open(path, "pt") as stored:
            said = stored.metadata() or {}
            if said.get("kind") != kind:
                raise FedHistError(f"{path} is not {kind}.")
            names = stored.keys()
            tensors = {name: stored.get_tensor(name) for name in sorted(names)}
        if said.get("blake2b") != _digest(tensors.items()):
            raise FedHistError(f"{path} was changed after it was written: its checksum does not match.")
        state: dict[str, Any] = json.loads(tensors.pop(STATE).numpy().tobytes())
    except (SafetensorError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FedHistError(f"{path} is not {kind}, or it is damaged: {reason(error)}.") from error
    except OSError as error:
        raise FedHistError(f"{path} cannot be read: {reason(error)}.") from error
    return tensors, state


def _check_length(path: Path) -> None:
    """Tell a file that was cut off, or is none of ours, from one whose content is wrong."""
    size = path.stat().st_size
    with plain(path) as file:
        first = file.read(9)
        length = int.from_bytes(first[:8], "little")
        if size < 9:
            raise FedHistError(f"{path} is truncated: it has {size} bytes.")
        if first[8:] != b"{" or length > 100_000_000:
            raise FedHistError(f"{path} is not a snapshot of fedhist: it does not begin like one.")
        if 8 + length > size:
            raise FedHistError(f"{path} is truncated: it ends after {size} bytes, within its header.")
        header = json.loads(first[8:] + file.read(length - 1))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    whole = 8 + length + max(ends, default=0)
    if size < whole:
        raise FedHistError(f"{path} is truncated: it has {size} of {whole} bytes.")


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor of the CPU whose values lie one after the other, also where there is only one."""
    plain = tensor.detach().cpu().contiguous()
    return plain if plain.numel() > 1 else plain.clone(memory_format=torch.contiguous_format)


def _digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a checksum of names, kinds, shapes and values."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
