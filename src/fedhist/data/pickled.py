"""Pickles that hold arrays, numbers and strings, and nothing else."""

from __future__ import annotations

import math
import pickletools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class _Mark:
    """Where on the stack a list, a tuple or a table begins."""


class PickledArray:
    """An array, before and after it is told what it holds."""

    def __init__(self) -> None:
        self.values: NDArray[Any] | None = None


class _Type:
    """The type of an array's numbers."""

    def __init__(self, name: object) -> None:
        name = name.decode("latin-1") if isinstance(name, bytes) else name
        if not isinstance(name, str) or not re.fullmatch("[biuf][1248]", name):
            raise ValueError("it has an array of something else than numbers")
        self.name, self.order = name, "="


_GLOBALS = {
    "numpy ndarray": "ndarray",
    "numpy dtype": "dtype",
    "numpy.core.multiarray _reconstruct": "array",
    "numpy._core.multiarray _reconstruct": "array",
}
_VALUES = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_NUMBERS = {"BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"}
_OLD_STRINGS = {"BINSTRING", "SHORT_BINSTRING"}  # of Python 2, in which CIFAR was written
_STRINGS = {"BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
_PLAIN = _NUMBERS | _STRINGS
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Global(str):
    """The name of one of the three things that make an array."""

    __slots__ = ()


def read_pickle(content: bytes) -> Any:
    """Return what a pickle holds, if that is arrays, numbers, strings, and lists, tuples and tables of them.

    Nothing is ever called: a pickle is a program for a small machine, and this is one that only knows the
    instructions which put such values together. An array is an :class:`PickledArray`.
    """
    machine = _Machine()
    # An instruction makes up to 200 bytes; a batch of images has one for every kilobyte.
    most = 10_000 + len(content) // 32
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(content)):
            if count > most:
                raise ValueError("it has too many parts for its size")
            if opcode.name == "STOP":
                return machine.pop()
            machine.step(opcode.name, argument)
    except (IndexError, KeyError, TypeError):
        raise ValueError("its parts do not fit together") from None
    raise ValueError("it has no end")


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def pop(self) -> Any:
        top = self.stack.pop()
        if isinstance(top, _Mark):
            raise ValueError("it takes what is not there")
        return top

    def items(self) -> list[Any]:
        """Take all above the last mark."""
        at = len(self.stack) - 1
        while not isinstance(self.stack[at], _Mark):
            at -= 1
            if at < 0:
                raise ValueError("it ends what was never begun")
        taken = self.stack[at + 1 :]
        del self.stack[at:]
        return taken

    def step(self, name: str, argument: Any) -> None:  # noqa: PLR0912 (one case for each kind of instruction)
        push = self.stack.append
        match name:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                push(_Mark())
            case "POP":
                self.stack.pop()
            case "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = self._top()
            case "MEMOIZE":
                self.memo[len(self.memo)] = self._top()
            case "BINGET" | "LONG_BINGET":
                push(self.memo[argument])
            case "EMPTY_LIST" | "EMPTY_DICT":
                push([] if name == "EMPTY_LIST" else {})
            case "TUPLE":
                push(tuple(self.items()))
            case "APPEND" | "APPENDS":
                more = [self.pop()] if name == "APPEND" else self.items()
                _of(list, self._top()).extend(more)
            case "SETITEM" | "SETITEMS":
                pairs = [self.pop(), self.pop()][::-1] if name == "SETITEM" else self.items()
                _filled(_of(dict, self._top()), pairs)
            case "GLOBAL":
                push(_Global(_GLOBALS[argument]) if argument in _GLOBALS else _refused(argument))
            case "STACK_GLOBAL":
                last, first = self.pop(), self.pop()
                named = f"{first} {last}" if isinstance(first, str) and isinstance(last, str) else ""
                push(_Global(_GLOBALS[named]) if named in _GLOBALS else _refused(named))
            case "REDUCE":
                arguments, function = self.pop(), self.pop()
                push(_made(function, _of(tuple, arguments)))
            case "BUILD":
                state = self.pop()
                _told(self._top(), _of(tuple, state))
            case _ if name in _TUPLES:
                size = _TUPLES[name]
                push(tuple([self.pop() for _ in range(size)][::-1]))
            case _ if name in _OLD_STRINGS:
                push(argument.encode("latin-1"))
            case _ if name in _PLAIN:
                push(argument)
            case _ if name in _VALUES:
                push(_VALUES[name])
            case _:
                raise ValueError(f"it holds more than arrays, numbers and strings ({name})")

    def _top(self) -> Any:
        top = self.pop()
        self.stack.append(top)
        return top


def _refused(named: str) -> Any:
    raise ValueError(f"it names {ascii(named[:100].replace(' ', '.'))[1:-1]}")


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"it has a {type(value).__name__.strip('_').lower()} where a {kind.__name__} belongs")
    return value


def _filled(table: dict[Any, Any], pairs: Sequence[Any]) -> dict[Any, Any]:
    if len(pairs) % 2:
        raise ValueError("it has a key without a value")
    for key, value in zip(pairs[::2], pairs[1::2], strict=True):
        if type(key) not in (bytes, str, int):  # to hash a tuple of tuples of … would not come back
            raise ValueError("it has a table with keys that are no names")
        table[key] = value
    return table


def _made(function: Any, arguments: tuple[Any, ...]) -> PickledArray | _Type:
    """Return what numpy's functions would make of these arguments."""
    if type(function) is _Global and function == "array" and arguments[0] == "ndarray":
        return PickledArray()
    if type(function) is _Global and function == "dtype":
        return _Type(arguments[0])
    raise ValueError("it calls what is no function")


def _told(thing: Any, state: tuple[Any, ...]) -> None:
    """Let an array or a type know what is in it."""
    if isinstance(thing, _Type):
        order = state[1].decode("latin-1") if isinstance(state[1], bytes) else state[1]
        if order not in ("<", ">", "|", "=") or any(each is not None for each in state[2:5]):
            raise ValueError("it has an array of something else than numbers")
        thing.order = order
    elif isinstance(thing, PickledArray):
        _, shape, kind, fortran, data = state
        if not isinstance(kind, _Type) or not isinstance(shape, tuple) or type(data) is not bytes:
            raise ValueError("it has an array of something else than numbers")
        dtype = np.dtype(("" if kind.order == "|" else kind.order) + kind.name)
        sized = len(shape) <= 8 and all(type(n) is int and n >= 0 for n in shape)
        if not sized or math.prod(shape) * dtype.itemsize != len(data):
            raise ValueError(f"it has an array whose shape does not go with its {len(data)} bytes")
        thing.values = np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")
    else:
        raise ValueError("it fills in what is no array")
