"""Describe the origin of a result: device, versions, date and command."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path

import jax

from jaxmp.base import versions

_PACKAGES = ("jaxmp", "jax", "jaxlib", "flax", "optax", "numpy")
_COMPILERS = ("jax-cuda13-plugin", "nvidia-cuda-nvcc", "libtpu")
_FLOAT8 = "JAXMP_FLOAT8"


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
    compiled_for = {}
    if target:
        from jaxmp.inspect.compiled import targets

        compiled_for, packages = {"target": targets.target_of(target).name}, (*packages, *_COMPILERS)
    device = jax.devices()[0]
    cores = f", {os.cpu_count()} cores" if device.platform == "cpu" else ""
    installed = [f"{name} {versions.of(name)}" for name in (*_PACKAGES, *filter(_is_installed, packages))]
    return {
        **compiled_for,
        "device": f"{jax.device_count()} × {device.device_kind} ({device.platform}{cores})",
        "versions": ", ".join([f"Python {platform.python_version()}", *installed]),
        "date": datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z"),
        "command": command(),
    }


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


def _is_installed(package: str) -> bool:
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False
