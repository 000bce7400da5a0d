"""Whose privacy an upload spends, on a network where a node may be anybody's.

A node's id is all that is certain; the name a client gives itself is a claim. With a registered key a client returns
under the same id. Without one it returns under a new id, and nothing shows that it has been here before. What holds
then rests on one assumption: *a client runs at most one node at a time*. A node that comes may be any client whose node
is gone, and cannot be one whose node is still there.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from fedhist.store.history import ACCOUNT
from fedhist.strategies import Private

UNNOTICED = 90.0
"""Seconds for which a dead node may be listed as connected: Flower's two heartbeats of 30 s, and a margin."""


class Fact(NamedTuple):
    """Something that happened to a node's account, for the history."""

    kind: str
    node: int
    about: Mapping[str, object]


class Accounts:
    """One account for each node that was ever sent work, under a number that no other node gets.

    A node that comes is admitted `UNNOTICED` seconds later, when all that died before it came are known to be gone, and
    counts as having spent as much as any of these. That goes for one that returns under its old id as well: its client
    may have run another node meanwhile. Nodes that are there at the first look, before anybody has spent anything, are
    admitted at once, and so are all where nodes are `authenticated`.
    """

    def __init__(self, privates: Sequence[Private], num_clients: int, *, authenticated: bool) -> None:
        self.privates, self.num_clients, self.authenticated = privates, num_clients, authenticated
        self.numbers: dict[str, int] = {}
        """The clients' numbers, by :func:`node_name`."""
        self.admitted: set[int] = set()
        """Connected nodes whose accounts cover all that their clients have spent. They belong into a checkpoint:
        nothing is spent until the server is resumed, so those that are still there need not wait again."""
        self._since: dict[int, float] = {}  # when those that wait to be admitted came
        self._refused: set[int] = set()

    def meet(self, connected: Collection[int], busy: Collection[int], time: float) -> list[Fact]:
        """Record who is connected, and admit those whose time has come.

        Of `busy` nodes an upload is still to be counted: it is under way, or waits for its round to close.
        """
        here, facts = set(connected), []
        wait = 0.0 if self.authenticated or not self.numbers else UNNOTICED
        self.admitted &= here
        self._refused &= here
        self._since = {node: self._since.get(node, time) for node in sorted(here - self.admitted)}
        if ready := [node for node, since in self._since.items() if time - since >= wait]:
            gone = {} if self.authenticated else self._gone(here, busy)
            for node in ready:
                facts += self._admit(node, gone)
        return facts

    def _gone(self, here: Collection[int], busy: Collection[int]) -> dict[int, int]:
        """Return the clients that are not here, each with how many of its uploads are still to be counted."""
        present, uploading = ({node_name(node) for node in nodes} for nodes in (here, busy))
        return {client: int(name in uploading) for name, client in self.numbers.items() if name not in present}

    def _admit(self, node: int, gone: Mapping[int, int]) -> list[Fact]:
        """Give a node its account, which covers what any of those that are gone has spent; or refuse it."""
        name, opened = node_name(node), node_name(node) not in self.numbers
        if opened and len(self.numbers) == self.num_clients:
            reason = f"all num_clients={self.num_clients} accounts are taken, and none is given to another node"
            refused = [] if node in self._refused else [Fact("refused", node, {"reason": reason})]
            self._refused.add(node)
            return refused
        self.admitted.add(node)
        client = self.numbers.setdefault(name, len(self.numbers))
        of, *_ = [private.inherit(client, gone) for private in self.privates]
        about = {"client": client, "spent": float(self.privates[0].spent[client])}
        return [Fact(ACCOUNT, node, about if of is None else about | {"of": of})] if opened or of is not None else []


def node_name(node: int) -> str:
    """Return the name under which a node is listed."""
    return f"node {node}"
