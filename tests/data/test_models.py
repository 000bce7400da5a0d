from __future__ import annotations

import sys
import types
import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap

import fedhist as fh
from fedhist.data.models import MODELS, model_of

IMAGES, SERIES = torch.randn(2, 3, 16, 16), torch.randn(2, 6, 50)
TEXT = torch.randint(0, 80, (2, 80), dtype=torch.uint8)
TAKES = dict.fromkeys(MODELS, IMAGES) | {"char-lstm": TEXT, "char-transformer": TEXT}


@pytest.mark.parametrize("name", MODELS)
def test_models_map_a_batch_to_logits(name: str) -> None:
    make = model_of(name, TAKES[name], 80)
    assert make is model_of(name, TAKES[name].clone(), 80), "tasks of several seeds know each other by it"
    model = make()
    logits = model(TAKES[name])
    assert logits.shape == (2, 80)
    logits.sum().backward()
    unused = [key for key, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not unused


@pytest.mark.parametrize(("name", "size"), [("resnet8", 77_850), ("resnet18", 11_164_362), ("char-lstm", 820_522)])
def test_sizes(name: str, size: int) -> None:
    model = model_of(name, TAKES[name], 80 if name == "char-lstm" else 10)()
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(size, rel=0.01)


def test_series_and_small_images() -> None:
    for name in ("cnn", "mlp"):
        assert model_of(name, SERIES, 7)()(SERIES).shape == (2, 7)
    digits = torch.randn(2, 1, 8, 8)
    for name in ("lenet", "cnn", "resnet8", "mlp"):
        assert model_of(name, digits, 10)()(digits).shape == (2, 10)


@pytest.mark.parametrize("name", ["cnn", "resnet8", "mlp", "char-transformer"])
def test_many_clients_train_at_once(name: str) -> None:
    """As the batched trainer does, to the same gradients and without a warning that it is slow."""
    torch.manual_seed(0)
    own = TAKES[name].double() if TAKES[name].is_floating_point() else TAKES[name]  # so that rounding is no difference
    inputs = torch.stack([own, own.flip(0)])
    models = [model_of(name, TAKES[name], 80)().double() for _ in range(2)]
    parameters, buffers = stack_module_state(models)

    def loss(own: dict[str, torch.Tensor], fixed: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(functional_call(models[0], (own, fixed), (x,)), torch.tensor([1, 2]))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        together = vmap(grad(loss))(parameters, buffers, inputs)
    for i, model in enumerate(models):
        alone = grad(loss)(dict(model.named_parameters()), dict(model.named_buffers()), inputs[i])
        for key, value in alone.items():
            assert torch.allclose(together[key][i], value, atol=1e-9), key


def test_the_transformer_looks_at_order_and_at_all_characters() -> None:
    model = model_of("char-transformer", TEXT, 80)().eval()
    with torch.no_grad():
        before = model(TEXT)
        for place in (0, 40, 79):
            other = TEXT.clone()
            other[:, place] = (other[:, place] + 1) % 80
            assert not torch.allclose(model(other), before, atol=1e-6)
        assert not torch.allclose(model(TEXT.flip(1)), before, atol=1e-6)


def test_the_transformer_leaves_out_only_what_is_not_read() -> None:
    """Its last layer computes one position; all of them give the same logits and the same gradients."""
    model = model_of("char-transformer", TEXT, 80)().double()
    for length in (80, 7):
        x = model.embedding(TEXT[:, :length].long()) + model.positions[:length]
        for layer in model.layers:
            x = layer(x, model.hidden[:length, :length])
        slow, fast = model.out(model.norm(x[:, -1])), model(TEXT[:, :length])
        assert torch.allclose(slow, fast, atol=1e-12)
        gradients = [torch.autograd.grad(logits.square().sum(), [*model.parameters()]) for logits in (slow, fast)]
        assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(*gradients, strict=True))


def test_models_by_name_in_tasks() -> None:
    task = fh.load_task("digits", 10, model="mlp")
    assert task.about["model"] == "mlp" and type(task.build(0)).__name__ == "MLP"
    assert "model" not in fh.load_task("digits", 10).about
    assert fh.load_task("digits", 10, model="lenet").model is fh.load_task("digits", 10, seed=1).model
    for name, sentence in {
        "lenett": r"^unknown model 'lenett': did you mean 'lenet'\?$",
        "char-lstm": r"^model='char-lstm' takes text, not inputs of shape \(1, 8, 8\) and type torch.float32; choose",
        "nowhere.at.all:f": r"^model='nowhere.at.all:f' cannot be imported: No module named 'nowhere'; run this where",
        "math:nothing": r"^model='math:nothing' cannot be imported: module 'math' has no attribute 'nothing'\.$",
        "math:pi": r"^model='math:pi' must name a function or a class, got float\.$",
    }.items():
        with pytest.raises(fh.InvalidInput, match=sentence):
            fh.load_task("digits", 10, model=name)


def test_a_model_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("my_models")
    module.linear = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_models", module)
    task = fh.load_task("digits", 10, model="my_models:linear")
    assert task.model is module.linear and task.layout.size == 650 and task.about["model"] == "my_models:linear"


@pytest.mark.parametrize(
    ("norm", "shape", "groups"),
    [
        (nn.BatchNorm2d(48), (2, 48, 5, 5), 24),
        (nn.BatchNorm2d(64), (2, 64, 5, 5), 32),
        (nn.BatchNorm3d(7), (2, 7, 2, 2, 2), 7),
        (nn.BatchNorm1d(16), (2, 16), 8),
        (nn.BatchNorm1d(7), (2, 7, 5), 1),
        (nn.BatchNorm2d(8, affine=False), (2, 8, 3, 3), 8),
    ],
)
def test_to_group_norm(norm: nn.Module, shape: tuple[int, ...], groups: int) -> None:
    if norm.affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    model = nn.Sequential(nn.Identity(), nn.ModuleDict({"inner": norm})["inner"], nn.ReLU(), norm)
    made = fh.to_group_norm(model)
    assert type(made[1]) is nn.GroupNorm and made[1] is made[3] and made[1].num_groups == groups
    assert type(model[1]) is type(norm) and type(model[1]) is not nn.GroupNorm, "it is a copy"
    if norm.affine:
        assert torch.equal(made[1].weight, norm.weight) and torch.equal(made[1].bias, norm.bias)
        assert made[1].weight is not norm.weight
    assert made(torch.randn(shape)).std() > 0.1, "a group of one number would be nothing but its bias"


def test_a_model_with_batch_norm_can_be_used_after_it() -> None:
    x, y = torch.randn(12, 3, 8, 8), torch.arange(12) % 3
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3))
    assert fh.Task(model, x, y, [range(6), range(6, 12)], x, y).layout.statistics
    task = fh.Task(fh.to_group_norm(model), x, y, [range(6), range(6, 12)], x, y)
    assert task.layout.size == task.layout.width and not task.layout.statistics
    with pytest.raises(fh.InvalidInput, match="^model must be an nn.Module, got function.$"):
        fh.to_group_norm(lambda: model)  # type: ignore[arg-type]


def test_names_in_the_help_are_those_there_are() -> None:
    from fedhist.command.settings import all_options  # noqa: PLC0415

    assert all(f"{name}," in all_options()["model"].help for name in MODELS)
    assert all(f'"{name}"' in (fh.load_task.__doc__ or "") for name in MODELS)
