"""Devices measured elsewhere: how long they compute and how fast their network is."""

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from fedhist.errors import InvalidInput, choice, number, require
from fedhist.world.tables import (
    Floats,
    Ints,
    content_of,
    deal,
    devices_of,
    ids_of,
    is_csv,
    lines_of,
    read_number,
    read_numbers,
    read_once,
    text_of,
)

PER = "training", "example"
"""What a time is for: one whole local training, or each example that a client processes in it."""
COLUMNS = "compute", "up", "down", "latency"
FORWARD_AND_BACKWARD = 3
"""How many times as long as inference, which FedScale's file has, training takes; FedScale's number."""
KILOBIT = 1024
"""Bits; FedScale divides sizes in units of 1024 bits by the kbps of its file."""


@dataclass(frozen=True, eq=False)
class Devices:
    """Measured devices, one a row; a column that a file does not have is None."""

    count: int
    checksum: str
    ids: Ints | None = None
    """The clients whose rows these are; None if they are nobody's in particular."""
    compute: Floats | None = None
    """Seconds for one example."""
    up: Floats | None = None
    """Bits per second."""
    down: Floats | None = None
    latency: Floats | None = None
    """Seconds for each transfer."""


@lru_cache(maxsize=4)
def read_devices(file: str, *_: int) -> Devices:
    """Read a CSV file with a line for each device, or FedScale's ``client_device_capacity``."""
    content, checksum = content_of(file)
    labels, table = _measured(content) if is_csv(file) else _capacities(content)
    for column in table.values():
        column.setflags(write=False)  # all runs share them
    return Devices(len(next(iter(table.values()))), checksum, ids_of(labels), **table)


def _measured(content: bytes) -> tuple[list[str], dict[str, Floats]]:
    """Return the clients' names, and the columns of a CSV file."""
    labels, table = list[str](), dict[str, list[float]]()
    for line, row in lines_of(text_of(content), ()):
        labels += [row["client"]] if "client" in row else []
        for name in COLUMNS:
            if name in row:
                value = read_number(f"{name} in line {line}", row[name], above=name != "latency")
                table.setdefault(name, []).append(value)
    require(bool(table), f"it must have a line for each device, with some of the columns {', '.join(COLUMNS)}")
    require(len({*labels}) == len(labels), "it has a client twice")
    return labels, {name: np.array(values) for name, values in table.items()}


def _capacities(content: bytes) -> tuple[list[str], dict[str, Floats]]:
    """Return the columns of FedScale's pickle, ``{id: {"computation": ms, "communication": kbps}}``.

    They give the times of its ``client_metadata.py`` and ``aggregator.py``. Its ids are not those of clients.
    """
    devices = devices_of(content, {"computation": (float, int), "communication": (float, int)}).values()
    compute = read_numbers("computation", [each["computation"] for each in devices], above=True)
    bandwidth = KILOBIT * read_numbers("communication", [each["communication"] for each in devices], above=True)
    return [], {"compute": FORWARD_AND_BACKWARD * compute / 1000, "up": bandwidth, "down": bandwidth}


@dataclass(frozen=True)
class DeviceTable:
    """Devices measured elsewhere: how long they take for an example, and how fast their network is.

    As `speeds` it says how long clients compute, as `network` how long their traffic takes, and a client has the same
    device in both. Devices with the ids of clients are theirs; others are dealt out by the seed.

    Parameters
    ----------
    file
        A CSV file with some of the columns `client`, `compute` (seconds for one example), `up` and `down` (bits per
        second) and `latency` (seconds for each transfer); a file of any other name is read as FedScale's
        ``client_device_capacity``. FedScale's times are those of inference, and taken times 3, as FedScale does.
    jitter
        Coefficient of variation of one client's times.
    per
        What `compute` is for: one "example" or a whole "training".
    """

    file: str
    jitter: float = 0.0
    per: str = "example"
    checksum: str = field(init=False)
    rows: Devices = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        number("jitter", self.jitter, 0)
        choice("per", self.per, PER)
        rows = read_once(self.file, read_devices)
        for name, value in {"file": str(self.file), "rows": rows, "checksum": rows.checksum}.items():
            object.__setattr__(self, name, value)

    def _deal(self, num_clients: int, seed: int) -> Ints:
        return deal(self.rows.ids, self.rows.count, num_clients, seed, "device table")

    def mean_times(self, num_clients: int, seed: int) -> Floats:
        """Return each client's time for one example, ``(N,)``."""
        if self.rows.compute is None:
            raise InvalidInput(f"{self.file} has no column compute, which says how long clients take.")
        return self.rows.compute[self._deal(num_clients, seed)]

    def times(self, num_clients: int, seed: int, upload: float, download: float) -> Floats:
        """Return the seconds that one training's traffic of so many bytes takes, ``(N,)``; without a column, none."""
        rows, seconds = self.rows, np.zeros(self.rows.count)
        fits = any(column is not None for column in (rows.up, rows.down, rows.latency))
        require(fits, f"{self.file} has none of the columns up, down and latency, which say how long traffic takes.")
        for size, speed in ((number("upload", upload, 0), rows.up), (number("download", download, 0), rows.down)):
            if speed is not None:
                seconds += 8 * size / speed
        if rows.latency is not None:
            seconds += 2 * rows.latency
        return seconds[self._deal(num_clients, seed)]
