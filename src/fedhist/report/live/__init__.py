"""`on_round` hooks that show runs under way: on a terminal, and in tools that keep metrics."""

from fedhist.report.live.figures import figures, fresh
from fedhist.report.live.json_lines import JsonLines
from fedhist.report.live.prometheus import Prometheus
from fedhist.report.live.tensorboard import TensorBoard

__all__ = ["JsonLines", "Prometheus", "TensorBoard", "figures", "fresh"]
