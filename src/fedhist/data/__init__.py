"""Data sets, splits, and the task they make together with a model."""

from fedhist.data.datasets import load_task
from fedhist.data.partition import SplitNotice, dirichlet, exclusive, iid, shards
from fedhist.data.task import Task

__all__ = ["SplitNotice", "Task", "dirichlet", "exclusive", "iid", "load_task", "shards"]
