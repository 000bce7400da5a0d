"""A vision transformer to measure with, which the package does not have.

In this folder: ``fedhist bench updates --model vision:vit``.
"""

import torch
from torch import Tensor, nn

WIDTH, HEADS, LAYERS, PATCH = 192, 3, 6, 4


class ViT(nn.Module):
    """A small vision transformer (Dosovitskiy et al., 2021) of PyTorch's own layers, for images of 32×32."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn((32 // PATCH) ** 2, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.out(self.encoder(tokens).mean(dim=1))  # type: ignore[no-any-return]


def vit() -> nn.Module:
    """Return a ViT of six layers of 192."""
    return ViT()
