"""Describe the origin of a result: device, versions, date and command.

The module also checks that there is a GPU.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

import jaxmp
from jaxmp.inspect.compiled import targets

_PACKAGES = ("jaxmp", "jax", "jaxlib", "flax", "optax", "numpy")
_FLOAT8 = "JAXMP_FLOAT8"
_COMPILERS = ("jax-cuda13-plugin", "nvidia-cuda-nvcc")


def environment(packages: tuple[str, ...] = (), target: str | None = None) -> dict[str, str]:
    """Return the device, versions, date and command.

    The versions are those of Python, of the packages that every result depends on, and of ``packages``.

    Args:
      packages: names of further distributions. Distributions that are not installed are left out.
      target: the GPU that programs are compiled for, if it is not attached: a name in
        :data:`jaxmp.inspect.compiled.targets.TARGETS`. The result then begins with ``target``, and the versions include
        the packages that compile for this GPU.

    Raises:
      ValueError: ``target`` is unknown.
    """
    compiled_for = {"target": targets.target_of(target).name} if target else {}
    packages = (*packages, *(_COMPILERS if target else ()))
    device = jax.devices()[0]
    cores = f", {os.cpu_count()} cores" if device.platform == "cpu" else ""
    versions = [f"{name} {version(name)}" for name in (*_PACKAGES, *filter(_installed, packages))]
    return {
        **compiled_for,
        "device": f"{jax.device_count()} × {device.device_kind} ({device.platform}{cores})",
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
        "date": datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z"),
        "command": command(),
    }


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


def version(package: str) -> str:
    """Return the installed version of a package. jaxmp need not be installed."""
    return jaxmp.__version__ if package == "jaxmp" else metadata.version(package)


def _installed(package: str) -> bool:
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False


def command() -> str:
    """Return the command line of this process, as one would type it.

    If the variable JAXMP_FLOAT8 is set, the line begins with the variable, because it changes how float8 is computed.
    """
    variables = [f"{_FLOAT8}={shlex.quote(os.environ[_FLOAT8])}"] if os.environ.get(_FLOAT8) else []
    return " ".join([*variables, shlex.join([*program_line(), *sys.argv[1:]])])


def program_line() -> list[str]:
    """Return the command that started this process, without its arguments."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        return ["python", "-m", spec.name.removesuffix(".__main__")]
    script = Path(sys.argv[0]).absolute()
    return ["python", str(script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script.name)]


if __name__ == "__main__":
    print(json.dumps(place()))
