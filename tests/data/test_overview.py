from __future__ import annotations

import numpy as np
import pytest
import torch

import fedhist as fh
from tests.conftest import blobs


def task(model: object = "mlp", **options: object) -> fh.Task:
    (x, y), (x_test, y_test) = blobs(60, 1), blobs(30, 2)
    data = {"x": x.numpy(), "y": y.numpy(), "x_test": x_test.numpy(), "y_test": y_test.numpy()}
    return fh.Task(model, clients=torch.arange(60).reshape(6, 10), **(data | options))  # type: ignore[arg-type]


def test_a_table_for_a_notebook() -> None:
    html = task()._repr_html_()
    for name, value in {
        "clients": "6, with 10 to 10 examples (median 10)",
        "classes": "3",
        "test examples": "30",
    }.items():
        assert f"<td>{name}</td><td>{value}</td>" in html
    assert "<td>model</td><td>mlp, " in html
    assert "<td>model</td><td>Linear, 18 parameters</td>" in task(torch.nn.Linear(5, 3))._repr_html_()
    assert "<td>model</td><td>lenet, " in fh.load_task("digits", clients=5)._repr_html_()


def test_a_model_by_its_name_fits_the_data() -> None:
    made = task()
    assert made.num_classes == 3 and made.about["model"] == "mlp" and made.num_clients == 6
    first, again, other = (made.layout.flatten(made.build(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    y = np.ones((60, 2), np.float32)
    assert task(y=y, y_test=np.ones((30, 2), np.float32), loss="mse").build(0)(torch.ones(1, 5)).shape == (1, 2)
    with pytest.raises(fh.InvalidInput, match="unknown model 'mpl': did you mean 'mlp'"):
        task("mpl")
    with pytest.raises(fh.InvalidInput, match="model='lenet' takes square images, not inputs of shape"):
        task("lenet")
    with pytest.raises(fh.InvalidInput, match="model='mlp' needs x and y as one tensor or array each"):
        task(x={"a": np.ones((60, 5))})


def half(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    return 0.5


@pytest.mark.parametrize(("metrics", "names"), [("f1", ["f1"]), (half, ["half"]), (["f1", half], ["f1", "half"])])
def test_one_metric_needs_no_list(metrics: object, names: list[str]) -> None:
    assert [each.name for each in task(metrics=metrics).metrics] == names
