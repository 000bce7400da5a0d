"""A small network for digits in NumPy: a client's process that imports no more starts in a second."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

SHAPES = ((64, 32), (32,), (32, 10), (10,))
"""Weights and biases of two layers."""
SIZES = [int(np.prod(shape)) for shape in SHAPES]


def start(seed: int) -> Floats:
    """Return a model to start from, as one vector: a single array travels fastest."""
    rng = np.random.default_rng(seed)
    parts = [rng.normal(0, (2 / shape[0]) ** 0.5, shape) if len(shape) == 2 else np.zeros(shape) for shape in SHAPES]
    return np.concatenate([part.ravel() for part in parts]).astype(np.float32)


def layers(model: Floats) -> list[Floats]:
    """Return views of a model's weights and biases."""
    parts = np.split(model, np.cumsum(SIZES)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, SHAPES, strict=True)]


def train(
    model: Floats, x: Floats, y: NDArray[np.int64], lr: float, steps: int, batch_size: int, rng: np.random.Generator
) -> Floats:
    """Return the model after some steps of SGD on the cross-entropy."""
    model = model.copy()
    w1, b1, w2, b2 = layers(model)
    for _ in range(steps):
        batch = rng.choice(len(y), min(batch_size, len(y)), replace=False)
        hidden = np.maximum(x[batch] @ w1 + b1, 0)
        error = softmax(hidden @ w2 + b2)
        error[np.arange(len(batch)), y[batch]] -= 1
        error /= len(batch)
        back = (error @ w2.T) * (hidden > 0)
        slopes = (x[batch].T @ back, back.sum(0), hidden.T @ error, error.sum(0))
        for values, slope in zip((w1, b1, w2, b2), slopes, strict=True):
            np.subtract(values, np.float32(lr) * slope, out=values)
    return model


def softmax(logits: Floats) -> Floats:
    """Return probabilities."""
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(powers / powers.sum(1, keepdims=True), np.float32)


def accuracy(model: Floats, x: Floats, y: NDArray[np.int64]) -> float:
    """Return the share of examples that are recognised."""
    w1, b1, w2, b2 = layers(model)
    return float(((np.maximum(x @ w1 + b1, 0) @ w2 + b2).argmax(1) == y).mean())


def load(file: str | Path) -> tuple[Floats, NDArray[np.int64]]:
    """Return the examples of a file."""
    with np.load(file) as data:
        return data["x"], data["y"]
