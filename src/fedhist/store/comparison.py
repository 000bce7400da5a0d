"""The runs of a comparison."""

from typing import SupportsIndex, overload

from fedhist.errors import unknown
from fedhist.store.history import History


class Comparison(list[History]):
    """The runs of a comparison, methods in the order given and seeds within each.

    ``runs[3]`` is one history, ``runs["FedHist"]`` the list of that method's histories.
    """

    @property
    def methods(self) -> list[str]:
        """The names of the methods compared."""
        return list(dict.fromkeys(history.method for history in self))

    @overload
    def __getitem__(self, key: SupportsIndex) -> History: ...
    @overload
    def __getitem__(self, key: str) -> list[History]: ...
    @overload
    def __getitem__(self, key: slice) -> list[History]: ...
    def __getitem__(self, key: SupportsIndex | str | slice) -> History | list[History]:
        if not isinstance(key, str):
            return super().__getitem__(key)
        if key not in self.methods:
            raise unknown("method", key, self.methods)
        return [history for history in self if history.method == key]
