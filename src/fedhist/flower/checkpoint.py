"""A server's state in one file, so that it is there whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedhist.errors import FedHistError
from fedhist.files import whole_file

FILE, FORMAT = "kasync.safetensors", "fedhist K-async server, 1"
STATE = "json"
"""What is not a tensor, as one: the header of the file may not grow beyond 100 MB."""


def write(folder: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write a checkpoint; the one before stays until the new one is complete."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(folder / FILE) as part:
            own = {name: tensor.contiguous() for name, tensor in tensors.items()}
            own[STATE] = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
            save_file(own, part, metadata={"format": FORMAT})
    except (OSError, SafetensorError) as error:
        raise FedHistError(f"checkpoint {folder / FILE} cannot be written: {error}.") from error


def read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Return a checkpoint, None if there is none."""
    file = folder / FILE
    if not file.exists():
        return None
    try:
        with safe_open(file, "pt") as stored:
            said = stored.metadata() or {}
            if said.get("format") != FORMAT:
                raise FedHistError(f"{file} is not a checkpoint of a K-async server.")
            names = stored.keys()
            tensors = {name: stored.get_tensor(name) for name in names}
            return tensors, json.loads(tensors.pop(STATE).numpy().tobytes())
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise FedHistError(f"{file} cannot be read: {error}.") from error
