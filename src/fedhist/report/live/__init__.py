"""What can be seen of runs under way: on a terminal, and in tools that keep records.

Everything here is an `on_round` hook: it is called with a round's number and the histories so far.
"""

from fedhist.report.live.figures import figures, fresh
from fedhist.report.live.tensorboard import TensorBoard

__all__ = ["TensorBoard", "figures", "fresh"]
