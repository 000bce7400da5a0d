from __future__ import annotations

import sys

import pytest

import fedhist as fh
from fedhist.store.table import Table, frame

TABLE = Table("Two", ["method", "final"], [["FedAvg", "1.0"], ["a|b", "12.5 ± 0.1"]], ["A note."])


def test_is_aligned_markdown_when_printed() -> None:
    assert str(TABLE).splitlines() == [
        "Two",
        "",
        "| method |      final |",
        "| ------ | ---------: |",
        "| FedAvg |        1.0 |",
        "| a\\|b   | 12.5 ± 0.1 |",
        "",
        "A note.",
    ]


def test_names_in_a_notebook_are_not_html() -> None:
    html = Table("<b>", ["<i>"], [["<script>"]], ["&"])._repr_html_()
    for given in ("<script>", "<i>", "<p><b><b>"):
        assert given not in html
    assert "&lt;script&gt;" in html and "&lt;i&gt;" in html and "<p>&amp;</p>" in html


def test_a_data_frame() -> None:
    pd = pytest.importorskip("pandas")
    expected = pd.DataFrame({"method": ["FedAvg", "a|b"], "final": ["1.0", "12.5 ± 0.1"]})
    pd.testing.assert_frame_equal(TABLE.to_frame(), expected)


def test_without_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(fh.InvalidInput, match=r"^to_frame\(\) needs pandas; install it with: pip install pandas\.$"):
        frame({"a": [1]})
