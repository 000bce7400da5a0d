"""Gaussian noise that is a function of keys.

It needs no generator whose state would have to be kept: a run that is resumed draws the same numbers, and so
does a captured CUDA graph in which only the keys change. The mixing function is not a cipher, so this is for
simulation; noise that must stay secret comes from :func:`secret_gaussian`.
"""

import math
import os

import torch
from torch import Tensor

_GOLDEN, _FIRST, _SECOND = (value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""The constants of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), as signed 64-bit integers, which wrap."""
_WORD = 1 << 64
PIECE = 1 << 20
"""Secret numbers that are made at a time: on the way they take ten times their memory."""


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shift right and fill with zeros; PyTorch's own shift of negative numbers fills with ones."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _mixed(x: Tensor) -> Tensor:
    """Return 64 bits that look independent for different inputs."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _mixed_number(x: int) -> int:
    """Return the same for one number: a few tiny tensors would take twenty times as long."""
    x = (x ^ (x >> 30)) * _FIRST % _WORD
    x = (x ^ (x >> 27)) * _SECOND % _WORD
    return x ^ (x >> 31)


def keyed_number(*keys: int) -> int:
    """Return what :func:`keyed` does, of numbers."""
    mixed = 0
    for key in keys:
        mixed = _mixed_number((mixed + key * _GOLDEN + _GOLDEN) % _WORD)
    return mixed


def keyed(*keys: Tensor | int) -> Tensor:
    """Return one key made of several, such as a seed, a client and a version; they are broadcast."""
    mixed = torch.zeros((), dtype=torch.int64)  # a scalar of the CPU goes with tensors of any device
    for key in keys:
        mixed = _mixed(mixed + torch.as_tensor(key, dtype=torch.int64) * _GOLDEN + _GOLDEN)
    return mixed


def bits(key: Tensor | int, size: int, device: torch.device) -> Tensor:
    """Return 64 random bits for each of `size` numbers, as signed integers: the same key, the same bits."""
    if isinstance(key, int):
        begin = _mixed_number(key % _WORD)
        return _mixed(torch.arange(size, device=device).mul_(_GOLDEN).add_(begin - _WORD if begin >> 63 else begin))
    return _mixed(_mixed(key.to(device)) + torch.arange(size, device=device) * _GOLDEN)


def gaussian(keys: Tensor, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return standard normal numbers, ``(*keys.shape, size)``: the same keys, the same numbers."""
    half = (size + 1) // 2
    counter = torch.arange(2 * half, device=keys.device) * _GOLDEN
    return _normal(_mixed(_mixed(keys)[..., None] + counter))[..., :size].to(dtype)


def secret_gaussian(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return standard normal numbers, ``(size,)``, from the operating system's generator: nobody can repeat them."""
    pieces = [torch.empty(0, dtype=dtype)]
    for begin in range(0, size, PIECE):
        count = min(PIECE, size - begin)
        bits = torch.frombuffer(bytearray(os.urandom(8 * (count + count % 2))), dtype=torch.int64)
        pieces.append(_normal(bits)[:count].to(dtype))
    return torch.cat(pieces)


def _normal(bits: Tensor) -> Tensor:
    """Turn an even number of random 64-bit integers, along the last axis, into as many normal numbers."""
    half = bits.shape[-1] // 2
    uniform = (_shifted(bits, 11).double() + 0.5) * 2.0**-53  # in (0, 1)
    radius = torch.sqrt(-2 * torch.log(uniform[..., :half]))  # Box and Muller
    angle = 2 * math.pi * uniform[..., half:]
    return torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)], dim=-1)
