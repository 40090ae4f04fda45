"""Describe the origin of a result: device, versions, date and command.

The module also checks that there is a GPU.
"""

from __future__ import annotations

import json
from importlib import metadata
from typing import Any

import jax

from experiments.training import origin
from jaxmp.inspect.compiled import targets

_COMPILERS = ("jax-cuda13-plugin", "nvidia-cuda-nvcc", "libtpu")


def environment(packages: tuple[str, ...] = (), target: str | None = None) -> dict[str, str]:
    """Return the device, versions, date and command.

    The versions are those of Python, of the packages that every result depends on, and of ``packages``.

    Args:
      packages: names of further distributions. Distributions that are not installed are left out.
      target: the GPU or TPU that programs are compiled for, if it is not attached: a name in
        ``jaxmp.inspect.compiled.targets.target_of``. The result then begins with ``target``, and the versions include
        the packages that compile for such devices.

    Raises:
      ValueError: ``target`` is unknown.
    """
    compiled_for = {"target": targets.target_of(target).name} if target else {}
    packages = (*packages, *(_COMPILERS if target else ()))
    return {**compiled_for, **origin.environment([*filter(_installed, packages)])}


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


def _installed(package: str) -> bool:
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False


if __name__ == "__main__":
    print(json.dumps(place()))
