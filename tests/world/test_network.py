from __future__ import annotations

import pickle

import numpy as np
import pytest

import fedhist as fh
from fedhist.world.network import as_network

N = 20_000


def test_times_are_bits_over_bandwidth_and_two_latencies() -> None:
    times = fh.Network(up=5e6, down=20e6, latency=0.05).times(3, seed=0, upload=1e6, download=4e6)
    assert times.tolist() == pytest.approx([8e6 / 5e6 + 32e6 / 20e6 + 0.1] * 3)
    assert fh.Network(1, 1).times(2, 0, 0, 0).tolist() == [0, 0]


def test_bandwidths_are_lognormal_around_their_medians() -> None:
    network = fh.Network(up=5e6, down=20e6, sigma=0.8)
    up, down = network.times(N, 3, 1e6, 0), network.times(N, 3, 0, 1e6)
    assert np.median(up) == pytest.approx(1.6, rel=0.03) and np.log(up).std() == pytest.approx(0.8, rel=0.02)
    assert up == pytest.approx(4 * down)  # one draw a client scales both ways
    assert np.array_equal(up, network.times(N, 3, 1e6, 0)) and not np.array_equal(up, network.times(N, 4, 1e6, 0))


def test_texts_and_objects() -> None:
    assert as_network("up=5e6,down=20e6,latency=0.05") == fh.Network(5e6, 20e6, 0.05)
    assert as_network("down=1,up=2,sigma=0.5") == fh.Network(2, 1, sigma=0.5)
    network = fh.Network(1, 2)
    assert as_network(network) is network and as_network(None) is None
    assert pickle.loads(pickle.dumps(network)) == network and hash(network) == hash(fh.Network(1, 2))
    assert repr(network) == "Network(up=1, down=2, latency=0.0, sigma=0.0)"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: fh.Network(0, 1), "up must be positive, got 0."),
        (lambda: fh.Network(1, -1), "down must be positive, got -1."),
        (lambda: fh.Network(1, 1, latency=-1), "latency must not be negative, got -1."),
        (lambda: fh.Network(1, 1, sigma=-1), "sigma must not be negative, got -1."),
        (lambda: fh.Network(1, 1).times(3, 0, -1, 0), "upload must not be negative, got -1."),
        (lambda: fh.Network(1, 1, sigma=1e4).times(9, 0, 1, 1), "gives times that are not numbers; use milder"),
        (lambda: as_network("up=5e6"), "network needs down, as in network:down=…."),
        (lambda: as_network("up=5e6,down"), "cannot be read; write up=5e6,down=20e6,latency=0.05."),
        (lambda: as_network("up=5e6,down=1,lag=2"), "unknown option of network 'lag'"),
        (lambda: as_network("wifi"), "unknown network 'wifi': choose from table."),
        (lambda: as_network(5), "network must be a string or an object such as fedhist.Network"),
        (lambda: as_network(fh.Network), "network must be a string or an object such as fedhist.Network"),
    ],
)
def test_refuses(make: object, sentence: str) -> None:
    with pytest.raises(fh.InvalidInput, match=sentence):
        make()  # type: ignore[operator]
