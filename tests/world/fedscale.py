"""Small files in the formats of FedScale's two."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import numpy as np

CPH1801 = {
    "duration": 211625,
    "inactive": [65881, 133574, 208292, 276575, 295006, 356236, 400906, 475099],
    "finish_time": 518400,
    "active": [12788, 100044, 188992, 271372, 276663, 352625, 356267, 441193],
    "model": "CPH1801",
}
"""One phone of ``client_behave_trace``, as a comment in ahmedcs/REFL quotes it."""


def capacities(table: Mapping[int, tuple[float, float]]) -> bytes:
    """Return a pickle like ``client_device_capacity``: NumPy scalars in protocol 3, as NumPy 1 wrote them.

    With ids from 1 to 500,000 it has 39,369,071 bytes, as many as FedScale's.
    """
    scalars = {
        key: {"computation": np.float64(computation), "communication": np.float64(communication)}
        for key, (computation, communication) in table.items()
    }
    content = pickle.dumps(scalars, protocol=3).replace(b"numpy._core.multiarray", b"numpy.core.multiarray", 1)
    return content.replace(b"\x89\x88\x87", b"K\x00K\x01\x87", 1)


def write_trace(file: Path, table: Mapping[object, object]) -> str:
    """Write a pickle like ``client_behave_trace``."""
    file.write_bytes(pickle.dumps(table, protocol=3))
    return str(file)
