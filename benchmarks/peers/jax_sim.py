"""Workload W as a plain loop in JAX: FedAvg over K clients, which train side by side under one ``jit``.

    python benchmarks/peers/jax_sim.py --updates 300 --mode vmap

Run by ``measure.py`` with the Python of JAX's own environment. "vmap" batches the clients, which makes grouped
convolutions of theirs; "map" lets the compiled program train one client after the other. XLA has all cores.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import workload as w
from jax import Array, lax

args = w.parse(__doc__ or "")
Params = dict[str, Array]


def start() -> Params:
    """LeNet's parameters as PyTorch draws them."""
    return {name: jnp.asarray(value.numpy()) for name, value in w.LeNet().state_dict().items()}


def pooled(x: Array) -> Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


def loss(p: Params, x: Array, y: Array) -> Array:
    for name in ("conv1", "conv2"):
        x = lax.conv_general_dilated(x, p[f"{name}.weight"], (1, 1), "VALID") + p[f"{name}.bias"][:, None, None]
        x = pooled(jax.nn.relu(x))
    x = x.reshape(len(x), -1)
    for name in ("fc1", "fc2"):
        x = jax.nn.relu(x @ p[f"{name}.weight"].T + p[f"{name}.bias"])
    logits = x @ p["fc3.weight"].T + p["fc3.bias"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1).mean()


def local_update(params: Params, x: Array, y: Array) -> Params:
    """A client's steps of SGD, on minibatches ``(STEPS, BATCH, ...)``."""

    def step(p: Params, batch: tuple[Array, Array]) -> tuple[Params, None]:
        gradient = jax.grad(loss)(p, *batch)
        return jax.tree.map(lambda value, g: value - w.LR * g, p, gradient), None

    return lax.scan(step, params, (x, y))[0]


@partial(jax.jit, static_argnames="batched")
def round_of(params: Params, x: Array, y: Array, index: Array, batched: bool) -> Params:
    """FedAvg over the clients whose minibatches `index` holds, ``(K, STEPS, BATCH)``."""

    def one(own: Array) -> Params:
        return local_update(params, x[own], y[own])

    models = jax.vmap(one)(index) if batched else lax.map(one, index)
    return jax.tree.map(lambda each: each.mean(axis=0), models)


def main() -> None:
    x, y = (jnp.asarray(each.numpy()) for each in w.data())
    rng, params, sizes = np.random.default_rng(0), start(), list[int]()
    clock = w.Clock(lambda: len(sizes))
    for _ in range(args.rounds):
        clients = rng.choice(w.CLIENTS, w.K, replace=False)
        index = np.stack([rng.permutation(w.SAMPLES)[: w.STEPS * w.BATCH] + c * w.SAMPLES for c in clients])
        index = index.reshape(w.K, w.STEPS, w.BATCH)
        params = jax.block_until_ready(round_of(params, x, y, index, args.mode != "map"))
        sizes += [index.shape[2]] * (index.shape[0] * index.shape[1])
        clock.mark()
    w.check(all(bool(jnp.isfinite(each).all()) for each in params.values()), "the model diverged")
    clock.report(jax.__version__, "sync", f"FedAvg, plain JAX, {args.mode or 'vmap'}", sizes)


if __name__ == "__main__":
    main()
