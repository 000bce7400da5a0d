"""What many models compute at once on a GPU, as Triton kernels. Only a machine with Triton can import its modules."""

from functools import cache

import torch

from fedhist.errors import reason


@cache
def why_not(device: torch.device) -> str | None:
    """Return why Triton does not work on a device; None where it does."""
    if device.type != "cuda":
        return "it is for GPUs"
    try:
        from fedhist.clients.kernels.pool import max_pool  # noqa: PLC0415

        max_pool(torch.zeros(1, 1, 4, 4, device=device), 2)
    except Exception as error:  # it compiles with whatever is installed, so it may raise anything
        return reason(error)
    return None
