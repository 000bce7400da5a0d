"""Defences against attackers: strategies around another strategy; one paper, one file."""

from fedhist.strategies.robust.clip import NormClip
from fedhist.strategies.robust.coordinates import CoordinateMedian, TrimmedMean
from fedhist.strategies.robust.defence import Defence, RobustAverage
from fedhist.strategies.robust.krum import Krum

__all__ = ["CoordinateMedian", "Defence", "Krum", "NormClip", "RobustAverage", "TrimmedMean"]
