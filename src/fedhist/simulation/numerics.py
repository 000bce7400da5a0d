"""What decides the last bits of a result besides the trial: the programs and the processor that compute it."""

from collections.abc import Mapping, Sequence

import torch

from fedhist import native
from fedhist.clients.local import Local
from fedhist.clients.native import why_not_native
from fedhist.clients.objectives import TaskLoss
from fedhist.native import processor
from fedhist.simulation.plan import Plan


def numerics(plans: Sequence[Plan], device: torch.device) -> list[dict[str, str]]:
    """Return what must be the same for runs to be resumed to the bit, in words."""
    known: dict[tuple[object, ...], dict[str, str]] = {}
    keys = [(*plan.trial.task.data, id(plan.trial.task.model), plan.trainer) for plan in plans]
    for key, plan in zip(keys, plans, strict=True):
        if key not in known:
            known[key] = _numerics(plan, device)
    return [known[key] for key in keys]


def _numerics(plan: Plan, device: torch.device) -> dict[str, str]:
    known = {"PyTorch": str(torch.__version__)}
    if device.type == "cuda":
        libraries = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"  # type: ignore[no-untyped-call]
        return known | {"GPU": torch.cuda.get_device_name(device), "libraries": libraries}
    known |= {"processor": processor(), "instructions": torch.backends.cpu.get_cpu_capability()}
    if plan.trainer == "native":
        trial = plan.trial
        compiled = why_not_native(trial.task, trial.seed, Local(), TaskLoss()) is None
        return known | {"compiled kernel": native.fingerprint() if compiled else "none"}
    # A client of the threaded trainer has one thread, and so has the server beside it.
    return known if plan.trainer == "threaded" else known | {"threads": str(torch.get_num_threads())}


def differences(there: Mapping[str, object], here: Mapping[str, str]) -> str | None:
    """Return in which of these two machines differ, as part of a sentence; None if results would be the same."""
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    return (
        "; ".join(f"{name} {there.get(name, 'none')!s:.80} there, {here.get(name, 'none')} here" for name in names)
        or None
    )
