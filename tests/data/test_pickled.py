"""Pickles as an attacker would write them. Nothing may be called, and nothing may grow."""

from __future__ import annotations

import pickle
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
from fedhist.data.pickled import PickledArray, read_pickle

from fedhist.data.formats import read_cifar

ARRAY = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
BYTE = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"


def of_bytes(shape: bytes, data: bytes = b"T\x02\0\0\0ab") -> bytes:
    """Return an array of bytes with a state of one's own."""
    return ARRAY + b"(K\x01" + shape + BYTE + b"\x89" + data + b"tb."


@pytest.mark.parametrize("protocol", [3, 4])
@pytest.mark.parametrize(
    "value",
    [
        {b"a": [1, -5, 2**40, 1.5, None, True, False], b"b": (), "c": (1,), b"d": (1, 2, 3, 4), b"e": [[], {}, ""]},
        {b"one": b"x"},
        [b"same"] * 3,
        "text",
        2**2000,
    ],
)
def test_plain_values_are_read(value: Any, protocol: int) -> None:
    assert read_pickle(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", [3, 4])
@pytest.mark.parametrize("kind", ["u1", "i8", "<f4", ">i2", "?", "f8"])
def test_arrays_are_read(kind: str, protocol: int) -> None:
    array = np.arange(12).reshape(3, 4).astype(kind)
    for each in (array, np.asfortranarray(array)):
        read = read_pickle(pickle.dumps({b"x": each}, protocol))[b"x"]
        assert isinstance(read, PickledArray)
        np.testing.assert_array_equal(read.values, array)


class Calls:
    def __init__(self, *what: Any) -> None:
        self.what = what

    def __reduce__(self) -> Any:
        return self.what


def refused(content: bytes) -> str:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError) as caught:
            read_pickle(content)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 10 * len(content) + (4 << 20)
    return str(caught.value)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "value",
    [
        Calls(print, ("gotcha",)),
        Calls(eval, ("1/0",)),
        Calls(getattr, ("a", "join")),
        Calls(np.frombuffer, (b"abc",)),
        np.array([object()]),
        np.array(["text"]),
        np.zeros(2, "datetime64[s]"),
        np.zeros(2, [("a", "u1")]),
        np.float64(1.5),
        {1, 2},
        bytearray(b"x"),
        1j,
        Calls,
    ],
    ids=lambda value: type(value).__name__,
)
def test_everything_else_is_refused(value: Any, protocol: int, capsys: pytest.CaptureFixture[str]) -> None:
    refused(pickle.dumps({b"data": value, b"labels": [0]}, protocol))
    assert capsys.readouterr().out == ""


HOSTILE = {
    "no end": b"\x80\x02}",
    "nothing": b"",
    "only an end": b".",
    "a mark for a value": b"(.",
    "a mark in the memo": b"(q\x00h\x00.",
    "an unknown place of the memo": b"h\x07.",
    "items of what was never begun": b"]Ne.",
    "appended to what is no list": b"}Na.",
    "set in what is no table": b"]K\x01K\x02s.",
    "a list as key": b"}]Ns.",
    "a key without a value": b"}(K\x01u.",
    "a tuple of tuples as key": b"}" + b")" + b"\x85" * 5000 + b"Ns.",
    "a persistent id": b"Pid\n.",
    "a persistent object": b"K\x01Q.",
    "an extension": b"\x82\x01.",
    "an instance": b"(ios\nsystem\n.",
    "an object": b"(cnumpy\nndarray\no.",
    "a new object": b"cnumpy\nndarray\n)\x81.",
    "a buffer": b"\x97.",
    "a name made on the stack": b"\x8c\x02os\x8c\x06system\x93.",
    "a name with a dot": b"\x8c\x05numpy\x8c\x0endarray.__init\x93.",
    "a call of a string": b"U\x05dtypeU\x02u1\x85R.",
    "a call without arguments": b"cnumpy\ndtype\n)R.",
    "ndarray called": b"cnumpy\nndarray\nK\x05\x85R.",
    "_reconstruct of something else": b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\ndtype\nK\x00\x85U\x01b\x87R.",
    "a type that is an object": b"cnumpy\ndtype\nU\x01OK\x00K\x01\x87R.",
    "a type of tables": b"cnumpy\ndtype\nU\x05u1,u1K\x00K\x01\x87R.",
    "a type with fields": BYTE[: -len(b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb")] + b"N)}J\xff\xff\xff\xff"
    b"J\xff\xff\xff\xffK\x00tb.",
    "an array of objects": ARRAY + b"(K\x01K\x02\x85cnumpy\ndtype\nU\x02O8K\x00K\x01\x87R\x89]tb.",
    "a shape beyond its bytes": of_bytes(b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86"),
    "a shape that overflows": of_bytes(b"\x8a\x09" + b"\0" * 8 + b"\x01\x85", b"U\x00"),
    "a shape of zero and too much": of_bytes(b"K\x00\x8a\x09" + b"\0" * 8 + b"\x01\x86", b"U\x00"),
    "a negative shape": of_bytes(b"J\xff\xff\xff\xffJ\xfe\xff\xff\xff\x86"),
    "a shape that is no shape": of_bytes(b"U\x01a\x85"),
    "a shape of many dimensions": of_bytes(b"(" + b"K\x01" * 60 + b"K\x02t"),
    "data that are a list": of_bytes(b"K\x02\x85", b"](K\x01K\x02e"),
    "a state too short": ARRAY + b"(K\x01tb.",
    "a state that is a table": ARRAY + b"}b.",
    "a list with a state": b"]K\x01\x85b.",
    "a string of two gigabytes": b"T\xff\xff\xff\x7fabc.",
    "a negative string": b"T\xff\xff\xff\xffabc.",
    "bytes of many exabytes": b"\x8e" + b"\xff" * 7 + b"\x7f.",
    "text that is no text": b"X\x02\x00\x00\x00\xff\xff.",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_hostile_programs_are_refused(content: bytes) -> None:
    sentence = refused(content)
    assert 5 < len(sentence) < 200 and "\n" not in sentence


GROWING = {
    "empty lists": b"](" + b"]" * 1_000_000 + b"e.",
    "empty tables": b"](" + b"}" * 1_000_000 + b"e.",
    "marks": b"(" * 1_000_000 + b".",
    "numbers": b"](" + b"M\x00\x10" * 400_000 + b"e.",
    "places in the memo": b"N" + b"".join(b"r" + struct.pack("<I", i) for i in range(200_000)) + b".",
    "a far place in the memo": b"Nr\xff\xff\xff\xff" * 100_000 + b".",
    "nested tuples": b")" + b"\x85" * 1_000_000 + b".",
    "laughs": b"]q\x00" + b"".join(b"](" + b"h%c" % i * 100 + b"eq%c" % (i + 1) for i in range(200)) + b"." * 1,
}


@pytest.mark.parametrize("content", GROWING.values(), ids=GROWING)
def test_what_grows_is_refused(content: bytes) -> None:
    assert "too many parts for its size" in refused(content)


def test_nesting_is_no_recursion() -> None:
    """Within the number of parts that is allowed, what is nested is neither hashed nor compared nor shown."""
    assert read_pickle(b")" + b"\x85" * 9000 + b".") is not None
    with pytest.raises(ValueError, match="its data are not images"):
        read_cifar(b"}U\x04data)" + b"\x85" * 9000 + b"s.")


@pytest.mark.parametrize(
    ("data", "labels", "sentence"),
    [
        (np.zeros((2, 3072), np.uint8), [0, 10], "its labels are not numbers of 10 classes"),
        (np.zeros((2, 3072), np.uint8), [0, -1], "its labels are not numbers of 10 classes"),
        (np.zeros((2, 3072), np.uint8), [0, True], "its labels are not numbers of 10 classes"),
        (np.zeros((2, 3072), np.uint8), [0, 1.0], "its labels are not numbers of 10 classes"),
        (np.zeros((2, 3072), np.uint8), [0], "it has 2 images and 1 labels"),
        (np.zeros((0, 3072), np.uint8), [], "it has 0 images and 0 labels"),
        (np.zeros((2, 3071), np.uint8), [0, 1], "its data are not images"),
        (np.zeros((2, 3072), np.int8), [0, 1], "its data are not images"),
        ([1, 2], [0, 1], "its data are not images"),
    ],
)
def test_a_batch_must_make_sense(data: Any, labels: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_cifar(pickle.dumps({b"data": data, b"labels": labels}, 3))
