"""Dense numbers for clients, which strategies need, whatever they and their nodes are called."""

import re
from collections.abc import Mapping

from fedhist.flower.accounts import node_name
from fedhist.flower.nodes import Nodes
from fedhist.strategies.screening import Rejected


class Numbers(dict[str, int]):
    """The numbers of `num_clients` clients, from 0, by the names under which they are listed."""

    def __init__(self, num_clients: int, nodes: Nodes) -> None:
        super().__init__()
        self.num_clients, self._nodes = num_clients, nodes
        self._taken: set[int] = set()
        self._next = 0  # no number below is free
        self._from: dict[str, int] = {}  # the nodes that clients have come from last
        self._last: dict[int, str] = {}  # what those nodes' clients were called last
        self._gone: list[str] = []  # clients that were not here when it was last looked, and when that was
        self._looked = -1

    def restore(self, numbers: Mapping[str, int]) -> None:
        """Take over the numbers of an earlier server."""
        self.update(numbers)
        self._taken.update(numbers.values())

    def of(self, node: int, identity: str | None) -> int:
        """Return a client's number; raise if all are taken.

        The client of partition i has number i where that is free, as in a simulation of the same split. A node
        without a name gets a new number when it comes back under a new id. When none is left, a newcomer takes that
        of a client that is gone: most likely it is the same one. A node is one client at a time, or one that calls
        itself something else in every upload would take all numbers.
        """
        name = listed(node, identity)
        if name not in self:
            self[name] = self._free(identity, self._last.get(node))
            self._taken.add(self[name])
        if (before := self._from.get(name)) is not None and self._last.get(before) == name:
            del self._last[before]
        if self._last.get(node, name) != name:
            self._looked = -1
        self._from[name], self._last[node] = node, name
        return self[name]

    def _free(self, identity: str | None, before: str | None) -> int:
        """Return a number for a newcomer, or for the client of a node that was called something else `before`."""
        partition = re.fullmatch(r"partition (\d{1,9})", identity or "", re.ASCII)
        if partition and int(partition[1]) < self.num_clients and int(partition[1]) not in self._taken:
            return int(partition[1])
        while self._next in self._taken:
            self._next += 1
        if self._next < self.num_clients:
            return self._next
        if before is not None and before in self:
            return self._given_up(before)
        if not self._gone and self._looked != self._nodes.changes:  # which goes through all clients
            self._looked = self._nodes.changes
            self._gone = sorted((name for name in self if self._absent(name)), key=_unnamed_last)
        while self._gone:
            if (name := self._gone.pop()) in self and self._absent(name):
                return self._given_up(name)
        raise Rejected(f"there are more than num_clients={self.num_clients} clients")

    def _given_up(self, name: str) -> int:
        node = self._from.pop(name, None)
        if node is not None and self._last.get(node) == name:
            del self._last[node]
        return self.pop(name)

    def _absent(self, name: str) -> bool:
        """Whether a client is neither connected nor at work, or its node's client is called something else by now."""
        node = self._from.get(name, -1)
        return not self._nodes.here(node) or self._last.get(node) != name


def _unnamed_last(name: str) -> bool:
    return name.startswith("node ")


def listed(node: int, identity: str | None) -> str:
    """Return the name under which a client is listed; no name that a client gives itself looks like a node's."""
    return node_name(node) if identity is None else f"client {identity}"
