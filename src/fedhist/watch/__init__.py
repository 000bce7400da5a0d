"""What can be seen of runs under way: on a terminal, and in tools that keep records.

Everything here is an `on_round` hook: it is called with a round's number and the histories so far.
"""

from fedhist.watch.figures import figures, fresh
from fedhist.watch.tensorboard import TensorBoard

__all__ = ["TensorBoard", "figures", "fresh"]
