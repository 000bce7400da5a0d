"""A task at a glance, for a notebook."""

from typing import Any

import numpy as np
from torch import nn

from fedhist.data.columns import shape_of
from fedhist.store.table import html_table


def overview(task: Any) -> str:
    """Return a table of what a task consists of."""
    least, middle, most = np.quantile(task.sizes, [0, 0.5, 1])
    inputs, _ = task.first(1)
    facts = {
        "model": f"{_name(task)}, {task.layout.size:,} parameters",
        "inputs": shape_of(inputs),
        **({"classes": f"{task.num_classes:,}"} if task.num_classes else {}),
        "loss": task.loss_name,
        "metrics": ", ".join(each.name for each in task.metrics) or "–",
        "clients": f"{task.num_clients:,}, with {least:,.0f} to {most:,.0f} examples (median {middle:,.0f})",
        "training examples": f"{len(task.examples):,}",
        "test examples": ", ".join(f"{len(test):,}{name and f' ({name})'}" for name, test in task.tests.items()),
        **{name.replace("_", " "): str(value) for name, value in task.about.items() if name != "model"},
    }
    return html_table([], [list(fact) for fact in facts.items()], f"Task {task.name}")


def _name(task: Any) -> str:
    """Return what a task's model is called, without building it."""
    model = task.model
    if isinstance(model, nn.Module):
        return type(model).__name__
    made = getattr(model, "func", model)
    return str(task.about.get("model") or getattr(made, "__name__", type(made).__name__)).lstrip("_")
