"""A server's state in one file, so that it is there whole or not at all."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedhist.errors import FedHistError, reason
from fedhist.files import plain, whole_file

FILE, FORMAT = "kasync.safetensors", "fedhist K-async server, 2"
STATE = "json"
"""What is not a tensor, as one: the header of the file may not grow beyond 100 MB."""


def write(folder: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write a checkpoint; the one before stays until the new one is complete."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(folder / FILE) as part:
            own = {name: tensor.contiguous() for name, tensor in tensors.items()}
            own[STATE] = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
            save_file(own, part, metadata={"format": FORMAT, "digest": _digest(own)})
    except (OSError, SafetensorError) as error:
        raise FedHistError(f"checkpoint {folder / FILE} cannot be written: {reason(error)}.") from error


def _digest(tensors: dict[str, Tensor]) -> str:
    """Return a checksum of all that must not change by a bit: shapes, counters, numbers of clients, the state.

    The values of models are not in it: they would take long, and a run can go on from any that is finite.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if not tensor.is_floating_point() or name.startswith("rows."):
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Return a checkpoint, None if there is none."""
    file = folder / FILE
    if not file.exists():
        return None
    try:
        plain(file).close()
        with safe_open(file, "pt") as stored:
            said = stored.metadata() or {}
            if said.get("format") != FORMAT:
                raise FedHistError(f"{file} is not a checkpoint of a K-async server.")
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (it is no dict)
        if _digest(tensors) != said.get("digest"):
            raise ValueError("it was changed since it was written")
        return tensors, json.loads(tensors.pop(STATE).numpy().tobytes())
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise FedHistError(f"{file} cannot be read: {reason(error)}.") from error
