"""Defences against clients that attack: strategies around another strategy, one rule, one file."""

from fedhist.strategies.robust.clip import NormClip
from fedhist.strategies.robust.defence import Defence, RobustAverage
from fedhist.strategies.robust.krum import Krum
from fedhist.strategies.robust.median import CoordinateMedian
from fedhist.strategies.robust.trimmed import TrimmedMean

__all__ = ["CoordinateMedian", "Defence", "Krum", "NormClip", "RobustAverage", "TrimmedMean"]
