"""Where a result comes from: device, versions, date and command; whether there is a GPU for it."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path

import jax

import jaxmp

_PACKAGES = ("jaxmp", "jax", "jaxlib", "flax", "optax", "numpy")


def environment(packages: tuple[str, ...] = ()) -> dict[str, str]:
    """Device, versions of Python, of what matters and of what is installed of ``packages``, date and command."""
    device = jax.devices()[0]
    cores = f", {os.cpu_count()} cores" if device.platform == "cpu" else ""
    versions = [f"{name} {version(name)}" for name in (*_PACKAGES, *filter(_installed, packages))]
    return {
        "device": f"{jax.device_count()} × {device.device_kind} ({device.platform}{cores})",
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
        "date": datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z"),
        "command": command(),
    }


def require_gpu(smoke: bool) -> None:
    """Ends a benchmark of GPUs where there is none, unless it only has to run.

    Raises:
      ValueError: there is no GPU.
    """
    if not smoke and jax.default_backend() != "gpu":
        raise ValueError(
            f"this benchmark measures a GPU, but JAX finds only {jax.devices()[0].device_kind} "
            f"({jax.default_backend()}); install jax[cuda13] where there is one, or see it run small here with --smoke"
        )


def version(package: str) -> str:
    """The installed version of a package; jaxmp's own needs no installation."""
    return jaxmp.__version__ if package == "jaxmp" else metadata.version(package)


def _installed(package: str) -> bool:
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False


def command() -> str:
    """The command line of this process, as one would type it."""
    return shlex.join([*program_line(), *sys.argv[1:]])


def program_line() -> list[str]:
    """How this process was started, without its arguments."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        return ["python", "-m", spec.name.removesuffix(".__main__")]
    script = Path(sys.argv[0]).absolute()
    return ["python", str(script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script.name)]
