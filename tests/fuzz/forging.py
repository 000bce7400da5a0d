"""Forges files as somebody would who knows their formats: form and checksums are right, and the content is odd."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save

from fedhist.store import snapshot
from fedhist.store.recording import ARRAYS, CHECKSUMS, read_about, row_checksum

NESTED: Any = json.loads("[" * 300 + "]" * 300)
VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 7, 0.5, -0.0, 1e308, -1e308, 1e15, 10**15, 2**31, 2**53, 2**63, 2**64, -(2**63),
    10**400, float("nan"), float("inf"), "", "x", "x" * 20_000, "a\nb", "{}", "{x}", "%{x}", "[/b]", "../x", "1",
    "fedavg", "<a href='http://x'>y</a>", "\u202e\ud7ff", [], {}, [[]], [None], [1, 2, 3], {"a": 1}, NESTED,
]  # fmt: skip
NUMBERS = [0, 1, -1, -2, 3, 1e15, 2**31, 2**62, -(2**62), 1e30, 1e308, float("nan"), float("inf"), -float("inf")]
TYPES = ["bool", "int8", "int32", "int64", "uint64", "float16", "float32", "float64", ">f8", ">i4", "complex64", "S3"]
TORCH_TYPES = [torch.bool, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float64]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return where all values inside a value are."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def forged_value(value: Any, random: Random) -> Any:
    """Return a value with another in one place, or without it, or with one more."""
    path = random.choice(list(places(value)))
    if not path:
        return random.choice(VALUES)
    copy = json.loads(json.dumps(value))
    owner = copy
    for key in path[:-1]:
        owner = owner[key]
    change = random.random()
    if change < 0.1:
        del owner[path[-1]]
    elif change < 0.2 and isinstance(owner, dict):
        owner[str(random.choice(["more", "{x}", "", "task", "clients", "data", "k", "x" * 300]))] = random.choice(
            VALUES
        )
    elif change < 0.2:
        owner.extend(owner[:2])
    else:
        owner[path[-1]] = random.choice(VALUES)
    return copy


def forged_json(content: bytes, random: Random) -> bytes:
    return json.dumps(forged_value(json.loads(content), random)).encode()


def forged_lines(content: bytes, random: Random) -> bytes:
    lines = content.splitlines()
    if random.random() < 0.1:
        return b"\n".join(random.sample(lines, random.randrange(len(lines) + 1)))
    at = random.randrange(len(lines))
    lines[at] = forged_json(lines[at], random)
    return b"\n".join(lines) + b"\n"


def forged_toml(content: bytes, random: Random) -> bytes:
    lines = content.decode().splitlines()
    at = random.randrange(len(lines))
    value = random.choice([v for v in VALUES if v is not None and not isinstance(v, dict)])
    lines[at] = f"{lines[at].partition('=')[0]}= {json.dumps(value, ensure_ascii=False)}"
    return "\n".join(lines).encode()


def forged_array(array: np.ndarray, random: Random) -> np.ndarray:
    """Return an array of another type or shape, or with other values."""
    copy, number = array.copy(), np.asarray(random.choice(NUMBERS))
    changes: list[Callable[[], Any]] = [
        lambda: copy.astype(random.choice(TYPES)),
        lambda: random.choice([copy[None], copy.reshape(-1), copy.T, copy[..., None], copy.reshape(-1)[:1].sum()]),
        lambda: np.full(copy.shape, number),
        lambda: np.where(np.arange(copy.size).reshape(copy.shape) == random.randrange(copy.size + 1), number, copy),
    ]
    if copy.ndim:
        shorter = [copy[:0], copy[:1], copy[:-1], copy[..., :0], copy[..., :1], copy[..., :-1]]
        changes += [lambda: random.choice(shorter), lambda: np.concatenate([copy, copy[-1:]])]
    if copy.size:
        changes += 3 * [lambda: put(copy, random.randrange(copy.size), number)]
    with np.errstate(all="ignore"):
        return np.asarray(random.choice(changes)())


def put(array: np.ndarray, place: int, number: np.ndarray) -> np.ndarray:
    array.reshape(-1)[place] = number.astype(array.dtype)
    return array


def forged_arrays(content: bytes, random: Random) -> bytes:
    with np.load(io.BytesIO(content)) as stored:
        arrays = dict(stored)
    name = random.choice(sorted(arrays))
    change = random.random()
    if change < 0.06:
        del arrays[name]
    elif change < 0.12:
        arrays[random.choice([*arrays, "more", "id", "utility", "lengths"])] = arrays[name]
    elif name == "about":  # a recording's description
        arrays[name] = np.frombuffer(forged_json(arrays[name].tobytes(), random), np.uint8)
    else:
        arrays[name] = forged_array(arrays[name], random)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def forged_file(content: bytes, random: Random) -> bytes:
    """Return one array in another form, or with a header that promises more than there is."""
    if random.random() < 0.2:
        return content.replace(b"(", random.choice([b"(9", b"(999999999", b"(-", b"(9, "]), 1)
    try:
        array = np.load(io.BytesIO(content))
    except ValueError:  # of a recording that is under way
        return content[: random.randrange(len(content))]
    buffer = io.BytesIO()
    np.save(buffer, forged_array(array, random))
    return buffer.getvalue()


def forged_tensor(tensor: torch.Tensor, random: Random) -> torch.Tensor:
    if random.random() < 0.2 or tensor.dtype == torch.bfloat16:
        return tensor.to(random.choice(TORCH_TYPES))
    array = np.ascontiguousarray(forged_array(tensor.numpy(), random))
    if array.dtype.kind not in "biuf" or array.dtype.byteorder == ">" or array.dtype == np.uint64:
        array = np.zeros(array.shape)
    return torch.from_numpy(array.copy())


def forged_snapshot(content: bytes, random: Random) -> bytes:
    """Return a checkpoint with another value or tensor, and the checksum that is right then."""
    length = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + length])["__metadata__"]
    tensors = load(content)
    change, name = random.random(), random.choice(sorted(tensors))
    if change < 0.5:
        text = forged_json(tensors[snapshot.STATE].numpy().tobytes(), random)
        tensors[snapshot.STATE] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    elif change < 0.55:
        del tensors[name]
    elif change < 0.6:
        tensors[random.choice(["9.model", "model", "-1.x", "0.traces.more", "0.clock.time"])] = tensors[name].clone()
    elif name != snapshot.STATE:
        tensors[name] = forged_tensor(tensors[name], random)
    tensors = {name: snapshot.on_cpu(tensor) for name, tensor in tensors.items()}
    return save(tensors, metadata | {"blake2b": snapshot._digest(tensors)})


FORGERS: Mapping[str, Callable[[bytes, Random], bytes]] = {
    ".json": forged_json,
    ".jsonl": forged_lines,
    ".toml": forged_toml,
    ".npz": forged_arrays,
    ".npy": forged_file,
    ".safetensors": forged_snapshot,
}


def forge(path: Path, random: Random) -> bool:
    """Forge a file in place; return whether it is of a kind that can be."""
    if path.suffix not in FORGERS or not path.stat().st_size:
        return False
    path.write_bytes(FORGERS[path.suffix](path.read_bytes(), random))
    if (path.parent / CHECKSUMS).exists() and random.random() < 0.8:
        correct_checksums(path.parent)
    return True


def correct_checksums(folder: Path) -> None:
    """Let the checksums of a recording be those of what it holds now, as far as it can be read."""
    try:
        about, start = read_about(folder)
        arrays = [np.load(folder / name) for name in ARRAYS]
        seed, sums = about.seed_of(start), np.zeros((about.rounds, len(ARRAYS)), np.uint32)
        for i, row in enumerate(sums):
            row[:] = [row_checksum(seed, name, i + 1, array[i]) for name, array in zip(ARRAYS, arrays, strict=True)]
        np.save(folder / CHECKSUMS, sums)
    except Exception:  # it will be refused for another reason
        return


def swell(path: Path, random: Random) -> None:
    """Let a file seem larger than any memory, or than any disk."""
    os.truncate(path, 1 << random.choice([33, 40]))
