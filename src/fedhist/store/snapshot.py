"""State in one file, written completely or not at all: tensors as safetensors, and the rest as JSON among them."""

import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from fedhist.errors import FedHistError, reason, require
from fedhist.store.files import plain, whole_file

STATE = "json"
"""The name of the tensor that holds the JSON; the header of a safetensors file is limited to 100 MB."""


def write(
    path: Path, kind: str, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, private: bool = False
) -> None:
    """Write a snapshot; the one before stays until the new one is complete. May raise an OSError."""
    own = {name: on_cpu(tensor) for name, tensor in tensors.items()}
    own[STATE] = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    write_tensors(path, own, {"kind": kind, "blake2b": _digest(own)}, private=private)


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], about: dict[str, str] | None = None, *, private: bool = False
) -> None:
    """Write a safetensors file, completely or not at all; a `private` one only its owner may read.

    May raise an OSError.
    """
    from safetensors import SafetensorError  # noqa: PLC0415 (a simulation without checkpoints does not need it)
    from safetensors.torch import save_file  # noqa: PLC0415

    try:
        # It writes a file of its own beside the one that is asked for, which a kill would leave there.
        apart = TemporaryDirectory(prefix=f".{path.name}.{os.getpid()}.", suffix=".part", dir=path.parent)
        with whole_file(path, private=private) as part, apart as folder:
            save_file(dict(tensors), Path(folder) / path.name, metadata=about)
            (Path(folder) / path.name).replace(part)
        sync(path.parent)
    except SafetensorError as error:  # it wraps what the operating system reports
        raise OSError(str(error)) from error


def read(
    path: Path, kind: str | Collection[str], parse: Callable[[str], dict[str, Any]] = json.loads
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the state of a snapshot, or raise a FedHistError that says what is wrong with the file.

    It may be of several kinds, the present one first. `parse` turns the state's JSON into what is returned, or raises a
    ValueError.
    """
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415

    kinds = (kind,) if isinstance(kind, str) else tuple(kind)
    try:
        plain(path).close()
        with safe_open(path, "pt") as stored:
            metadata = stored.metadata() or {}
            if metadata.get("kind") not in kinds:
                raise FedHistError(f"{path} is not {kinds[0]}.")
            tensors = {name: stored.get_tensor(name) for name in sorted(stored.keys())}
        if metadata.get("blake2b") != _digest(tensors):
            raise FedHistError(f"{path} was changed after it was written: its checksum does not match.")
        state = parse(tensors.pop(STATE).numpy().tobytes().decode())
        require(isinstance(state, dict), "it does not hold values by their names")
    except SafetensorError as error:
        raise FedHistError(f"{path} is truncated or is not a snapshot of fedhist: {reason(error)}.") from error
    except (OSError, MemoryError) as error:
        raise FedHistError(f"{path} cannot be read: {reason(error)}.") from error
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:  # too deep JSON is the last
        raise FedHistError(f"{path} is not {kinds[0]}, or it is damaged: {reason(error)}.") from error
    return tensors, state


def sync(folder: Path) -> None:
    """Let the disk hold the new file's name as well: what follows may depend on it, such as privacy that is spent."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def check_forms(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise unless tensors of these names are there, in the types and the shapes of the expected ones."""
    for name, like in expected.items():
        require(name in found, f"it has no {name}")
        form, wanted = ((str(each.dtype), tuple(each.shape)) for each in (found[name], like))
        require(form == wanted, f"{name} is {form[0]} of shape {form[1]}, not {wanted[0]} of shape {wanted[1]}")


def on_cpu(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU whose values lie one after the other, also where there is only one."""
    own = tensor.detach().cpu().contiguous()
    return own if own.numel() > 1 else own.clone(memory_format=torch.contiguous_format)


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a checksum of names, types, shapes and values."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
