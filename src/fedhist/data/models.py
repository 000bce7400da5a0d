"""Models by name, for images, series and text; any other ``nn.Module`` works as well."""

import copy
import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhist.data.columns import as_tensor
from fedhist.data.text_models import CharLSTM, CharTransformer
from fedhist.errors import InvalidInput, require, unknown
from fedhist.options import imported

Shape = tuple[int, ...]
"""The shape of one input, without the batch."""


class LeNet(nn.Module):
    """LeNet-5 (LeCun et al., 1998) with ReLU and max pooling: conv6 - conv16 - 120 - 84 - classes.

    Square images of 8 pixels and more fit; those smaller than 32 are padded as in the original, so that
    28×28 and 32×32 images both reach the classifier as 16×5×5.
    """

    def __init__(self, channels: int = 3, size: int = 32, classes: int = 10) -> None:
        super().__init__()
        if size < 8:
            raise InvalidInput(f"size must be at least 8 pixels, got {size}.")
        pad1, pad2 = (2 if size < 32 else 0), (2 if size < 20 else 0)
        side = ((size + 2 * pad1 - 4) // 2 + 2 * pad2 - 4) // 2
        self.conv1 = nn.Conv2d(channels, 6, 5, padding=pad1)
        self.conv2 = nn.Conv2d(6, 16, 5, padding=pad2)
        self.fc1 = nn.Linear(16 * side * side, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        # Rectifying after pooling gives the same numbers as before it, on a quarter of the pixels.
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))  # type: ignore[no-any-return]


class CNN(nn.Module):
    """Two convolutions of width 5, each halved by max pooling, and two linear layers: 32 - 64 - 128 - classes.

    For images ``(channels, height, width)`` and for series ``(channels, length)``, of 4 points and more.
    """

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        conv = nn.Conv1d if len(shape) == 2 else nn.Conv2d
        self.pool: Callable[[Tensor, int], Tensor] = F.max_pool1d if len(shape) == 2 else F.max_pool2d
        self.conv1, self.conv2 = conv(shape[0], 32, 5, padding=2), conv(32, 64, 5, padding=2)
        self.fc1 = nn.Linear(64 * math.prod(side // 4 for side in shape[1:]), 128)
        self.fc2 = nn.Linear(128, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        x = F.relu(self.pool(self.conv1(x), 2))
        x = F.relu(self.pool(self.conv2(x), 2))
        return self.fc2(F.relu(self.fc1(x.flatten(1))))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Two hidden layers of 200, as McMahan et al. (2017) have them; inputs of any shape are flattened."""

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(math.prod(shape), 200), nn.Linear(200, 200)
        self.fc3 = nn.Linear(200, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1))))))  # type: ignore[no-any-return]


def _norm(channels: int) -> nn.GroupNorm:
    """Return GroupNorm over groups of eight channels, 32 groups at most."""
    return nn.GroupNorm(min(32, channels // 8), channels)


class _Block(nn.Module):
    """Two convolutions of 3×3 beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm1, self.norm2 = _norm(outputs), _norm(outputs)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class ResNet(nn.Module):
    """Residual network (He et al., 2016) for small images, with GroupNorm instead of BatchNorm.

    Depth 8 has three stages of one block with 16 to 64 channels, depth 18 has four of two with 64 to 512.
    """

    widths: Mapping[int, tuple[int, ...]] = {8: (16, 32, 64), 18: (64, 64, 128, 128, 256, 256, 512, 512)}

    def __init__(self, depth: int, channels: int, classes: int) -> None:
        super().__init__()
        widths = self.widths[depth]
        self.stem, self.norm = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False), _norm(widths[0])
        pairs = zip((widths[0], *widths), widths, strict=False)
        self.blocks = nn.Sequential(*(_Block(old, new, 1 if old == new else 2) for old, new in pairs))
        self.fc = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.fc(x.mean(dim=(2, 3)))  # type: ignore[no-any-return]


def _lenet(shape: Shape, classes: int) -> nn.Module:
    return LeNet(shape[0], shape[-1], classes)


def _resnet(depth: int, shape: Shape, classes: int) -> nn.Module:
    return ResNet(depth, shape[0], classes)


def _lstm(_: Shape, classes: int) -> nn.Module:
    return CharLSTM(classes)


def _transformer(shape: Shape, classes: int) -> nn.Module:
    return CharTransformer(classes, shape[0])


MODELS: Mapping[str, Callable[[Shape, int], nn.Module]] = {
    "lenet": _lenet,
    "cnn": CNN,
    "resnet8": partial(_resnet, 8),
    "resnet18": partial(_resnet, 18),
    "mlp": MLP,
    "char-lstm": _lstm,
    "char-transformer": _transformer,
}
"""From a model's name to a function that builds it for inputs of a shape and a number of outputs."""
_TAKES = {
    "lenet": "square images", "cnn": "images and series", "resnet8": "images", "resnet18": "images", "mlp": "numbers",
    "char-lstm": "text", "char-transformer": "text",
}  # fmt: skip


def model_of(name: str, inputs: Tensor, classes: int) -> Callable[[], nn.Module]:
    """Return the function that builds a model by its name, or by ``package.module:function`` where that is yours."""
    if ":" in name:
        return imported("model", name)  # type: ignore[no-any-return]
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    shape = tuple(inputs.shape[1:])
    kinds = {"numbers"} if inputs.is_floating_point() else {"text"} if len(shape) == 1 else set()
    if inputs.is_floating_point() and len(shape) in (2, 3):
        kinds |= {"images and series"} | ({"images"} if len(shape) == 3 else set())
        kinds |= {"square images"} if len(shape) == 3 and shape[1] == shape[2] else set()
    fitting = [each for each, takes in _TAKES.items() if takes in kinds]
    takes = f"model={name!r} takes {_TAKES[name]}, not inputs of shape {shape} and type {inputs.dtype}"
    require(name in fitting, f"{takes}; choose from {', '.join(fitting) or 'models of your own'}.")
    return _builder(name, shape, classes)


def model_for(name: str, x: Any, y: Any, loss: object) -> Callable[[], nn.Module]:
    """Return the function that builds a model by its name for given training data, as a task is given them."""
    fits = y is not None and not isinstance(y, (str, dict, tuple)) and not isinstance(x, (dict, tuple))
    require(fits, f"model={name!r} needs x and y as one tensor or array each; give a module for other data.")
    inputs, targets = as_tensor("x", x), as_tensor("y", y)
    require(targets.numel() > 0, "y holds no examples.")
    labels = loss == "cross-entropy"
    outputs = int(targets.max()) + 1 if labels else targets.shape[1] if targets.ndim > 1 else 1
    return model_of(name, inputs, outputs)


@lru_cache
def _builder(name: str, shape: Shape, classes: int) -> Callable[[], nn.Module]:
    """Return one function for each shape, by which tasks of several seeds are known to have the same model."""
    return partial(MODELS[name], shape, classes)


def to_group_norm(model: nn.Module) -> nn.Module:
    """Return a copy of a model with GroupNorm in the place of every BatchNorm, whose weights and biases are kept.

    Averages of batch statistics are not statistics of a common batch, so runs refuse models with BatchNorm. The
    groups are as many as divide the channels, 32 at most; those of BatchNorm1d have two channels at least, since a
    single number cannot be normalised.

    Parameters
    ----------
    model
        Any module; it is not changed.
    """
    require(isinstance(model, nn.Module), f"model must be an nn.Module, got {type(model).__name__}.")
    made: dict[nn.Module, nn.Module] = {}  # a layer that occurs twice stays one layer

    def converted(module: nn.Module) -> nn.Module:
        if module not in made:
            made[module] = module
            if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
                made[module] = _grouped(module)
            for name, child in module._modules.items():  # named_children() leaves out what it has listed before
                if child is not None:
                    setattr(module, name, converted(child))
        return made[module]

    return converted(copy.deepcopy(model))


def _grouped(norm: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) -> nn.GroupNorm:
    """Return GroupNorm with the weights of a BatchNorm."""
    channels = norm.num_features
    least = 2 if isinstance(norm, nn.BatchNorm1d) else 1
    groups = max((n for n in range(1, 33) if channels % n == 0 and channels // n >= least), default=1)
    group_norm = nn.GroupNorm(groups, channels, norm.eps, norm.affine).train(norm.training)
    if norm.affine:
        group_norm.to(norm.weight)
        with torch.no_grad():
            group_norm.weight.copy_(norm.weight)
            group_norm.bias.copy_(norm.bias)
        for name, parameter in group_norm.named_parameters():
            parameter.requires_grad_(getattr(norm, name).requires_grad)
    return group_norm
