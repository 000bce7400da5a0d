from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest

import fedhist as fh
from fedhist.streams import Stream
from fedhist.world.speeds import SPEEDS, Speeds, as_speeds, per_of, work_gammas, work_times

N = 20_000


@pytest.mark.parametrize(
    ("devices", "median"),
    [
        (fh.Constant(time=3.0), 3.0),
        (fh.Uniform(low=1.0, high=3.0), 2.0),
        (fh.LogNormal(sigma=0.7), 1.0),
        (fh.Exponential(scale=2.0), 2 * np.log(2)),
        (fh.Pareto(alpha=2.0), np.sqrt(2)),
        (fh.LogNormal(sigma=0.7, median=0.02, per="example"), 0.02),
        (fh.HalfNormal(scale=3.0), 3 * 0.6745),
        (fh.Mixture(), 0.5),
        (fh.Tiers(times=(1, 2, 9), shares=(3, 4, 3)), 2.0),
        (as_speeds("ai-benchmark:median=4"), 4.0),
    ],
)
def test_mean_times_follow_the_distribution(devices: Speeds, median: float) -> None:
    times = devices.mean_times(N, seed=0)
    assert times.shape == (N,) and (times > 0).all()
    assert np.median(times) == pytest.approx(median, rel=0.03)
    assert np.array_equal(times, devices.mean_times(N, seed=0))


OLD: list[tuple[Speeds, str, Callable[[np.random.Generator], np.ndarray]]] = [
    (fh.Constant(2.0), "Constant(time=2.0, jitter=0.0)", lambda rng: np.full(N, 2.0)),
    (fh.Uniform(), "Uniform(low=0.5, high=1.5, jitter=1.0)", lambda rng: rng.uniform(0.5, 1.5, N)),
    (fh.LogNormal(0.7), "LogNormal(sigma=0.7, jitter=1.0)", lambda rng: rng.lognormal(0.0, 0.7, N)),
    (fh.Exponential(3.0), "Exponential(scale=3.0, jitter=1.0)", lambda rng: rng.exponential(3.0, N)),
    (fh.Pareto(), "Pareto(alpha=2.0, jitter=1.0)", lambda rng: 1 + rng.pareto(2.0, N)),
]
"""Models as they were before times could be those of one example, how they were described and what they drew."""


@pytest.mark.parametrize(("speeds", "text", "draw"), OLD, ids=lambda value: value if isinstance(value, str) else "")
def test_models_draw_and_are_called_as_ever(
    speeds: Speeds, text: str, draw: Callable[[np.random.Generator], np.ndarray]
) -> None:
    """To the bit: checkpoints and histories name their speeds, and must be those of the same arrivals."""
    for seed in (0, 7):
        assert np.array_equal(speeds.mean_times(N, seed), draw(Stream(seed, "devices").at()))
    assert repr(speeds) == text
    assert per_of(speeds) == "training"


def test_a_description_tells_models_apart() -> None:
    assert repr(fh.LogNormal(median=0.1, per="example")) == (
        "LogNormal(sigma=0.5, jitter=1.0, median=0.1, per='example')"
    )
    assert repr(fh.Explicit([1.0, 2.0])) == "Explicit(times=(1.0, 2.0), jitter=0.0)"
    assert repr(fh.Tiers([1], [2])) == "Tiers(times=(1.0,), shares=(2.0,), jitter=1.0)"
    assert fh.LogNormal() != fh.LogNormal(per="example")


def test_times_are_those_of_a_training_unless_told() -> None:
    class Own:
        jitter = 0.0

    assert per_of(Own()) == "training"
    assert per_of(fh.Explicit([1.0], per="example")) == "example"
    assert per_of(fh.SlowGroup([0], others=fh.Constant(per="example"))) == "example"
    Own.per = "minibatch"  # type: ignore[attr-defined]
    with pytest.raises(fh.InvalidInput, match="per must be 'training' or 'example', got 'minibatch'."):
        per_of(Own())


def test_half_normal_is_bounded_away_from_zero() -> None:
    times = fh.HalfNormal(scale=2.0).mean_times(N, seed=1)
    assert times.min() == 0.02
    assert times.mean() == pytest.approx(2 * np.sqrt(2 / np.pi), rel=0.02)
    assert np.mean(times == 0.02) == pytest.approx(0.008, abs=0.003)


def test_a_mixture_has_exactly_its_share_of_slow_clients() -> None:
    times = fh.Mixture(slow=0.2, slow_time=5, fast_time=0.5).mean_times(100, seed=3)
    assert np.count_nonzero(times == 5) == 20 and np.count_nonzero(times == 0.5) == 80
    assert not np.array_equal(times, fh.Mixture().mean_times(100, seed=4))
    assert (fh.Mixture(slow=0).mean_times(9, 0) == 0.5).all() and (fh.Mixture(slow=1).mean_times(9, 0) == 5).all()
    assert as_speeds("ace") == fh.Mixture(0.2, 5.0, 0.5, 1.0)


@pytest.mark.parametrize(("name", "slowest"), [("fadas-mild", 6.5), ("fadas-large", 65.0)])
def test_fadas_classes_have_the_shares_of_its_dirichlet_vectors(name: str, slowest: float) -> None:
    classes = np.random.default_rng(0).dirichlet([3, 2, 1], 200_000).argmax(axis=1)  # as its utils.py draws them
    speeds = as_speeds(name)
    times = speeds.mean_times(200_000, seed=0)
    for kind, time in enumerate((1.5, 4.0, slowest)):
        assert np.mean(times == time) == pytest.approx(np.mean(classes == kind), abs=0.005)
    share, wide = np.bincount(classes) / len(classes), np.array([1, 2, 3 if slowest < 10 else 30])
    variations = wide / np.sqrt(12) / np.array([1.5, 4.0, slowest])  # of uniform distributions
    assert speeds.jitter == pytest.approx(share @ variations, abs=0.01)


def test_phones_have_the_times_and_shares_that_flash_has() -> None:
    times = as_speeds("phones").mean_times(N, seed=0)
    total = 18820 + 16428 + 159
    for time, count in ((1.642, 18820), (0.588, 16428), (0.179, 159)):
        assert np.mean(times == time) == pytest.approx(count / total, abs=0.012)
    one = as_speeds("phones:per=example")
    assert per_of(one) == "example" and np.allclose(10 * one.mean_times(N, seed=0), times)


def test_ai_benchmark_has_the_spread_of_its_phones() -> None:
    times = as_speeds("ai-benchmark").mean_times(N, seed=0)
    assert np.log(times).std() == pytest.approx(0.93, rel=0.02)
    assert np.quantile(times, 0.9) / np.quantile(times, 0.1) == pytest.approx(np.exp(0.93 * 2 * 1.2816), rel=0.05)


@pytest.mark.parametrize("name", sorted({*SPEEDS} - {"explicit", "table", "tiers"}))
def test_named_models_can_be_kept(name: str) -> None:
    speeds = as_speeds(name)
    assert pickle.loads(pickle.dumps(speeds)) == speeds and hash(speeds) == hash(as_speeds(name))
    assert as_speeds(f"{name}:per=example") != speeds if name != "random" else True
    assert (speeds.mean_times(50, seed=0) > 0).all()


def test_tiers_as_a_text() -> None:
    assert as_speeds("tiers:times=[1,5],shares=[0.8,0.2],jitter=0") == fh.Tiers((1, 5), (0.8, 0.2), 0)


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
        (lambda: fh.LogNormal(median=0), "median must be positive, got 0."),
        (lambda: fh.Pareto(per="epoch"), "per must be 'training' or 'example', got 'epoch'."),
        (lambda: fh.Explicit([1.0], per="epoch"), "per must be 'training' or 'example', got 'epoch'."),
        (lambda: fh.HalfNormal(scale=-1), "scale must be positive, got -1."),
        (lambda: fh.Mixture(slow=1.5), r"slow must lie in \[0, 1\], got 1.5."),
        (lambda: fh.Mixture(slow_time=0), "slow_time must be positive, got 0."),
        (lambda: fh.Tiers((1, 2), (1,)), "there are 2 times and 1 shares; give one of each for a tier."),
        (lambda: fh.Tiers((), ()), r"times must be a list of numbers, got \(\)."),
        (lambda: fh.Tiers("12", (1, 1)), "times must be a list of numbers, got '12'."),  # type: ignore[arg-type]
        (lambda: fh.Tiers((1, 2), (1, 0)), r"shares\[1\] must be positive, got 0."),
        (lambda: as_speeds("fadas-mid"), "unknown speeds 'fadas-mid': did you mean 'fadas-mild'?"),
    ],
)
def test_refuses(make: object, sentence: str) -> None:
    with pytest.raises(fh.InvalidInput, match=sentence):
        make()  # type: ignore[operator]
