"""Independent random streams from one seed, addressable at any point.

Philox is counter-based: the numbers for (client, version) can be drawn without drawing those before
them. That is why a method's batches do not depend on the methods beside it.
"""

import zlib

import numpy as np

from fedhist.errors import InvalidInput, whole


class Stream:
    """One named stream of a seed, such as "split", "schedule", "batches" or "init"."""

    def __init__(self, seed: int, name: str) -> None:
        if type(seed) is not int:
            seed = whole("seed", seed)
        if not 0 <= seed < 2**63:
            raise InvalidInput(f"seed must lie between 0 and 2^63 - 1, got {seed}.")
        self._bits = np.random.Philox(key=np.array([seed, zlib.crc32(name.encode())], dtype=np.uint64))
        self._generator = np.random.Generator(self._bits)
        self._state = self._bits.state

    def at(self, first: int = 0, second: int = 0) -> np.random.Generator:
        """Return the generator positioned at a point of the stream, reused between calls.

        Resetting it takes a microsecond; a new generator would take twenty.
        """
        self._state["state"]["counter"][:] = (0, 0, first, second)
        self._bits.state = self._state
        return self._generator

    def integer(self, first: int = 0, second: int = 0) -> int:
        """Return a 63-bit seed for a generator of another library."""
        return int(self.at(first, second).integers(2**63))
