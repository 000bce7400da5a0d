from __future__ import annotations

import numpy as np
import pytest

import fedhist as fh
from fedhist.world.speeds import Speeds, work_gammas, work_times

N = 20_000


@pytest.mark.parametrize(
    ("devices", "median"),
    [
        (fh.Constant(time=3.0), 3.0),
        (fh.Uniform(low=1.0, high=3.0), 2.0),
        (fh.LogNormal(sigma=0.7), 1.0),
        (fh.Exponential(scale=2.0), 2 * np.log(2)),
        (fh.Pareto(alpha=2.0), np.sqrt(2)),
    ],
)
def test_mean_times_follow_the_distribution(devices: Speeds, median: float) -> None:
    times = devices.mean_times(N, seed=0)
    assert times.shape == (N,) and (times > 0).all()
    assert np.median(times) == pytest.approx(median, rel=0.03)
    assert np.array_equal(times, devices.mean_times(N, seed=0))


def test_jitter_is_the_coefficient_of_variation() -> None:
    rng = np.random.default_rng(0)
    assert np.array_equal(work_times(np.full(3, 2.0), 0.0, work_gammas(3, 0.0, rng)), [2, 2, 2])
    for jitter in (0.2, 1.0):
        times = work_times(np.full(N, 5.0), jitter, work_gammas(N, jitter, rng))
        assert times.mean() == pytest.approx(5, rel=0.03)
        assert times.std() / times.mean() == pytest.approx(jitter, rel=0.03)


def test_slow_group_stretches_its_members() -> None:
    times = fh.SlowGroup([1, 3, 3], speed=0.25, others=fh.Constant(2.0)).mean_times(4, seed=0)
    assert times.tolist() == [2, 8, 2, 8]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: fh.Constant(time=0), "time must be positive, got 0."),
        (lambda: fh.Constant(jitter=-1), "jitter must not be negative, got -1."),
        (lambda: fh.Uniform(low=2, high=1), "low=2 must not exceed high=1."),
        (lambda: fh.LogNormal(sigma=-1), "sigma must not be negative, got -1."),
        (lambda: fh.Exponential(scale=0), "scale must be positive, got 0."),
        (lambda: fh.Pareto(alpha=0), "alpha must be positive, got 0."),
        (lambda: fh.Explicit([]), "times must be a list with a time for each client."),
        (lambda: fh.Explicit(3), "times must be a list with a time for each client."),  # type: ignore[arg-type]
        (lambda: fh.Explicit([1, -1]), r"times\[1\] must be positive, got -1."),
        (lambda: fh.Explicit(["a"]), r"times\[0\] must be a number, got 'a'."),  # type: ignore[list-item]
        (lambda: fh.Uniform(1, float("inf")), "high must be a number, got inf."),
        (lambda: fh.SlowGroup([0], speed=0), "speed must be positive, got 0."),
    ],
)
def test_refuses(make: object, sentence: str) -> None:
    with pytest.raises(fh.InvalidInput, match=sentence):
        make()  # type: ignore[operator]
