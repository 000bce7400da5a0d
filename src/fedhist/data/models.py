"""LeNet, the model of the paper's experiments; any other ``nn.Module`` works as well."""

import torch.nn.functional as F
from torch import Tensor, nn

from fedhist.errors import InvalidInput


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
