"""Is asynchrony worth it here? What a comparison answers, and what it does not claim."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fedhist as fh
from fedhist.report.answer import QUESTION, answer, synchronous
from fedhist.store.history import DIVERGED
from fedhist.store.statistics import ratio

ROUNDS, K, CLIENTS = 10, 2, 20
TARGET = 0.5


def run(
    method: str, seed: int, reached: int | None, *, pace: float = 1.0, at_work: int | None = None, **setting: Any
) -> fh.History:
    """Return a run that reaches the target in a round, or never; a round takes a time of `pace`."""
    shape, closed = (ROUNDS, K), pace * np.arange(1.0, ROUNDS + 1)
    above = [reached is not None and r >= reached for r in range(1, ROUNDS + 1)]
    return fh.History(
        method,
        seed,
        "t",
        np.tile(np.arange(K), (ROUNDS, 1)),
        np.ones(shape, np.int64),
        np.repeat(closed[:, None], K, axis=1),
        np.ones(shape, np.float32),
        [fh.Evaluation(r, closed[r - 1], 0.6 if a else 0.1, 1.0, [], 1.0, 1) for r, a in enumerate(above, 1)],
        setting={
            "clients": CLIENTS,
            "bytes_per_upload": 100,
            "bytes_per_download": 300,
            **({} if at_work is None else {"concurrency": at_work}),
            **setting,
        },
        closed=closed,
        work=(at_work or CLIENTS) * closed,
        sent=K * np.arange(1.0, ROUNDS + 1),
        received=K * np.arange(1.0, ROUNDS + 1),
    )


def sync(seed: int, reached: int | None, pace: float = 10.0, name: str = "sync") -> fh.History:
    return run(name, seed, reached, pace=pace, at_work=K)


def async_(seed: int, reached: int | None, pace: float = 1.0, name: str = "async") -> fh.History:
    return run(name, seed, reached, pace=pace)


def said(*runs: fh.History, target: float | None = TARGET) -> str:
    text = answer(fh.Comparison(runs), target)
    assert text.startswith(f"{QUESTION} ") and text.endswith(".") and "  " not in text
    return text.removeprefix(f"{QUESTION} ")


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({"closing": "Synchronous(k=2, over_select=1.3)"}, True),
        ({"closing": "synchronous:k=2"}, True),
        ({"concurrency": 2}, True),
        ({"clients": 2}, True),
        ({}, False),
        ({"concurrency": 3}, False),
        ({"closing": "FirstK(k=2)"}, False),
        ({"closing": "FirstK(k=2)", "concurrency": 2}, True),
        ({"closing": "Deadline(seconds=5.0)", "concurrency": 2}, False),
    ],
)
def test_which_runs_are_synchronous(setting: dict[str, Any], expected: bool) -> None:
    assert synchronous(run("a", 0, 1, **setting)) is expected


def test_nothing_is_answered_unless_both_kinds_are_there() -> None:
    assert answer(fh.Comparison([async_(0, 3), async_(0, 3, name="b")]), TARGET) == ""
    assert answer(fh.Comparison([sync(0, 3), sync(1, 3)]), TARGET) == ""
    assert said(sync(0, 3), async_(0, 3), target=None) == "Give a target, and the time to reach it will say."


def test_an_interval_by_hand() -> None:
    text = said(sync(0, 2), sync(1, 4), async_(0, 4), async_(1, 4))
    # Times 20 and 40 against 4 and 4: ratios 5 and 10, whose geometric mean is √50; with t = 12.706 for one degree of
    # freedom and a standard error of log(2)/2 the interval is √50 · 2^±6.353.
    assert text.startswith("These runs do not say, since the interval contains 1: async reaches 50 % first, ")
    assert "at the virtual time 4.00 against 28.3 with sync, 7.07 times as fast" in text
    assert f"95 % interval {50**0.5 / 2**6.3531:.4f} to 578, 2 seeds" in text
    # 20 clients for a time of 4 against 2 for 20 and for 40; 4 rounds of two models each way against 2 and 4.
    assert "Up to there it takes 1.41 times the client work (" in text and "1.41 times the bytes (" in text


def test_yes_beyond_doubt() -> None:
    text = said(*(sync(s, 4 + s % 2) for s in range(6)), *(async_(s, 5) for s in range(6)))
    assert text.startswith(
        "In time, yes: async reaches 50 % first, at the virtual time 5.00 against 44.7 with sync, 8.94"
    )
    # The logarithms of 8 and 10, three times each: t = 2.571 standard errors of 0.0499 either way.
    assert "times as fast (95 % interval 7.87 to 10.2, 6 seeds)." in text
    assert "Not counted" not in text and "evaluate more often" not in text


def test_no_where_synchronous_is_sooner() -> None:
    text = said(*(sync(s, 2, pace=1.0) for s in range(3)), *(async_(s, 6 + s) for s in range(3)))
    assert text.startswith(
        "In time, no: sync reaches 50 % first, at the virtual time 2.00 against 6.95 with async, 3.48"
    )
    assert "it takes 0.0288 times the client work" in text  # 2 clients for a time of 2 against 20 for 6.95


def test_one_seed_has_no_interval() -> None:
    text = said(sync(0, 2), async_(0, 4))
    assert text.startswith("In time, yes, as far as one seed can say: async reaches 50 % first")
    assert "5.00 times as fast (one seed: no interval). Up to there" in text
    assert "2.00 times the client work (one seed: no interval) and 2.00 times the bytes (one seed: no" in text


def test_an_interval_that_contains_one_decides_nothing() -> None:
    text = said(sync(0, 2, 2.0), sync(1, 6, 2.0), async_(0, 6), async_(1, 5))
    assert text.startswith("These runs do not say, since the interval contains 1: async reaches 50 % first")


def test_a_method_that_never_gets_there() -> None:
    text = said(*(sync(s, None) for s in range(2)), *(async_(s, 4) for s in range(2)))
    assert text == (
        "In time, yes: async reaches 50 % first, at the virtual time 4.00 against at least 100 with sync, at least "
        "25.0 times as fast (95 % interval 25.0 to 25.0, 2 seeds). Not reached by the end: 2 of 2 runs of sync, "
        "counted as if reached then."
    )
    text = said(sync(0, None), async_(0, 4))
    assert text.startswith("In time, yes, as far as one seed can say: ") and "(one seed: no interval)" in text
    # It ended before the other was there, so nobody knows.
    text = said(sync(0, None, pace=0.3), async_(0, 4))
    assert text == (
        "These runs do not say: async reaches 50 % at the virtual time 4.00, and sync has not reached it within 3.00, "
        "where its runs end. Run sync longer."
    )
    text = said(sync(0, None), sync(0, None, pace=20.0, name="slower"), async_(0, None))
    assert text == (
        "These runs do not say: no method reaches 50 % within 200 of virtual time. Run longer, or lower the target."
    )


def test_runs_that_do_not_get_there_are_bounds_or_named() -> None:
    text = said(*(sync(s, 4 if s else None) for s in range(3)), *(async_(s, 4) for s in range(3)))
    # Ratios of at least 25, and of 10 and 10.
    assert "against at least 54.3 with sync, at least 13.6 times as fast" in text and "3 seeds). Up to there" in text
    assert "Not reached by the end: 1 of 3 runs of sync, counted as if reached then." in text
    text = said(sync(0, None, pace=0.3), *(sync(s, 4) for s in (1, 2)), *(async_(s, 4) for s in range(3)))
    assert "Not counted: 1 of 3 runs of sync, which did not reach it within 3.00." in text and "2 seeds)" in text
    # The sooner one missed it in a seed: no verdict from those in which it was lucky.
    for sync_too in (4, None):
        text = said(*(sync(s, sync_too) for s in range(3)), *(async_(s, 4 if s else None) for s in range(3)))
        assert text.startswith("These runs do not say, since not every run of async gets there: async reaches 50 %")
        assert "Not counted: 1 of 3 runs of async, which did not reach it within 10.0" in text
    text = said(sync(0, 4), sync(1, None), async_(0, None), async_(1, 4))
    assert text == "These runs do not say: sync and async reach 50 % with different seeds."


def test_runs_that_diverged_are_named() -> None:
    lost = sync(2, 4)
    lost.events.append({"event": DIVERGED, "round": 5, "time": 50.0, "reason": "NaN"})
    text = said(sync(0, 4), sync(1, 4), lost, *(async_(s, 4) for s in range(3)))
    assert text.startswith("In time, yes") and "Not counted: 1 of 3 runs of sync, which diverged." in text
    assert said(lost, async_(2, 4)) == (
        "These runs do not say: async reaches 50 % at the virtual time 4.00, and sync diverged."
    )


def test_the_soonest_of_either_kind_are_compared() -> None:
    slow = [sync(s, 9, name="slow sync") for s in range(2)]
    never = [async_(s, None, name="never") for s in range(2)]
    text = said(*slow, *(sync(s, 4) for s in range(2)), *never, *(async_(s, 4 + s) for s in range(2)))
    assert "with sync," in text
    assert text.endswith(
        "sync is the soonest of 2 synchronous methods and async is the soonest of 2 asynchronous methods, on these "
        "seeds."
    )


def test_a_target_that_is_met_before_anybody_looks() -> None:
    text = said(sync(0, 3), async_(0, 1))
    assert "The first evaluation already finds async there; evaluate more often (eval_every)." in text


def test_costs_that_are_not_known() -> None:
    runs = [sync(0, 3), async_(0, 4)]
    for history in runs:
        history.work, history.sent = np.full(ROUNDS, np.nan), np.full(ROUNDS, np.nan)
    assert "Client work and bytes are not known." in said(*runs)


def test_the_ratio_is_that_of_pairs() -> None:
    found = ratio({0: 4.0, 1: 9.0, 2: 5.0}, {0: 2.0, 1: 1.0, 3: 7.0})
    assert found is not None and found.pairs == 2 and found.mean == pytest.approx(18**0.5)
    assert found.low is not None and found.high is not None and found.low * found.high == pytest.approx(18)
    alone = ratio({0: 4.0}, {0: 2.0})
    assert alone is not None and (alone.mean, alone.low, alone.high, alone.pairs) == (2.0, None, None, 1)
    assert ratio({0: 4.0}, {1: 2.0}) is None and ratio({0: 0.0}, {0: 2.0}) is None
    assert ratio({0: float("nan")}, {0: 2.0}) is None
