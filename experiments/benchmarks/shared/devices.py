"""The device of this machine, and benchmarks that need a GPU."""

from __future__ import annotations

import json
from typing import Any

import jax

from experiments.training.environment import environment


def place() -> dict[str, Any]:
    """Return the device, versions and backend."""
    description = environment()
    return {"device": description["device"], "versions": description["versions"], "backend": jax.default_backend()}


def require_gpu(smoke: bool) -> None:
    """Raise if there is no GPU, unless ``smoke`` is true.

    Raises:
      ValueError: there is no GPU.
    """
    if not smoke and jax.default_backend() != "gpu":
        raise ValueError(
            f"this benchmark needs a GPU, but JAX finds only {jax.devices()[0].device_kind} "
            f"({jax.default_backend()}); install jax[cuda13] on a machine with a GPU, or run it at small size with "
            "--smoke"
        )


if __name__ == "__main__":
    print(json.dumps(place()))
