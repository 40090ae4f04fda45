"""Check whether training works on this machine, for ``jaxmp doctor``."""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jaxmp

if TYPE_CHECKING:
    from jaxmp.base.hardware import Hardware

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt")
_SETTINGS = {
    "jax_enable_x64": (
        "new arrays are float64, which the fast units for half precision do not multiply",
        "unset JAX_ENABLE_X64, unless you want float64",
    ),
    "jax_default_matmul_precision": (
        "it sets the precision of every product whose policy has no matmul_precision",
        "unset JAX_DEFAULT_MATMUL_PRECISION and set the precision in the policy: Policy(..., matmul_precision=...)",
    ),
    "jax_debug_nans": (
        "a step that overflows raises an error, and loss scaling cannot skip it",
        "unset JAX_DEBUG_NANS while training with a dynamic loss scale",
    ),
    "jax_disable_jit": ("nothing is compiled", "unset JAX_DISABLE_JIT"),
}


@dataclasses.dataclass(frozen=True)
class SetupProblem:
    """A problem of the setup, and its remedy."""

    problem: str
    remedy: str


@dataclasses.dataclass(frozen=True)
class Report:
    """The report of ``jaxmp doctor``."""

    hardware: Hardware | None  # the first device; None if JAX cannot start
    devices: int  # the number of devices of this process
    trains: bool  # whether a mixed-precision training step ran on this machine and gave the right numbers
    training: str  # a sentence about this training step
    versions: dict[str, str | None]  # the version of each package; None if the package is missing
    findings: tuple[SetupProblem, ...]  # problems, and settings that affect training; empty if there are none


def diagnose() -> Report:
    """Check the settings and the device, and train one step."""
    versions, findings = _versions(), _check_platforms()
    try:
        import jax

        devices, hardware = jax.local_device_count(), jaxmp.hardware.detect()
    except Exception as error:  # any error is reported as a finding
        remedy = "see the whole error with: python -c 'import jax; jax.devices()'; a fresh environment often helps"
        findings.append(SetupProblem(f"JAX does not start: {_summary(error)}", remedy))
        return Report(None, 0, False, "not tried: JAX does not start", versions, tuple(findings))
    findings += [*_check_driver(hardware.platform), *_check_settings()]
    policy = "mixed_bfloat16" if hardware.recommended_policy == "float32" else hardware.recommended_policy
    try:
        train_one_step(policy)
    except Exception as error:  # any error is reported as a finding
        remedy = f'see where: python -c "import jaxmp.cli.diagnosis; jaxmp.cli.diagnosis.train_one_step({policy!r})"'
        findings.append(SetupProblem(f"one training step under {policy} fails: {_summary(error)}", remedy))
        return Report(hardware, devices, False, "does not work", versions, tuple(findings))
    training = f"works: one step under {policy}, with loss scaling, gave the right numbers"
    return Report(hardware, devices, True, training, versions, tuple(findings))


def train_one_step(policy: str) -> None:
    """Train a Dense layer for one step under ``policy``, and check the numbers.

    The step uses loss scaling. The inputs are chosen so that every intermediate value is exact in half precision.

    Raises:
      RuntimeError: the step ran and its numbers are wrong. Other errors are not caught.
    """
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    model = jaxmp.linen.apply_policy(nn.Dense(8, use_bias=False, kernel_init=nn.initializers.constant(0.5)), policy)
    inputs = jnp.ones((8, 8), jnp.float32)
    state = jaxmp.TrainState.create(
        apply_fn=model.apply,
        params=model.init(jax.random.key(0), inputs)["params"],
        tx=jaxmp.loss_scaling(optax.sgd(0.25), jaxmp.DynamicLossScale()),
    )

    def loss_fn(params: Any, model_state: Any, batch: jax.Array, rng: Any) -> tuple[jax.Array, Any]:
        outputs: Any = model.apply({"params": params}, batch)
        return jnp.mean(jnp.square(outputs.astype(jnp.float32))), model_state

    state, metrics = jaxmp.make_train_step(loss_fn)(state, inputs)
    # outputs 8·0.5 = 4, loss 16, gradient of a weight 8·2·4/64 = 1, weights 0.5 − 0.25·1
    loss, weights = float(metrics["loss"]), np.asarray(state.params["kernel"])
    if loss != 16.0 or not np.array_equal(weights, np.full((8, 8), 0.25, np.float32)):
        raise RuntimeError(
            f"one step under {policy} should give a loss of 16 and weights of 0.25, got {loss} and {weights[0, 0]}"
        )


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version(), "jaxmp": jaxmp.__version__}
    for package in (*_PACKAGES, *_PLUGINS):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            if package in _PACKAGES:
                versions[package] = None
    return versions


def _check_platforms() -> list[SetupProblem]:
    forced = os.environ.get("JAX_PLATFORMS")
    if not forced:
        return []
    problem = f"JAX_PLATFORMS={forced} is set: JAX uses no other kind of device"
    return [SetupProblem(problem, "unset JAX_PLATFORMS, unless you want this")]


def _check_driver(platform: str) -> list[SetupProblem]:
    """Report an NVIDIA GPU that JAX does not use.

    If JAX_PLATFORMS is set, nothing is reported here, because :func:`_check_platforms` reports the variable.
    """
    if platform != "cpu" or os.environ.get("JAX_PLATFORMS") or not nvidia_driver():
        return []
    return [
        SetupProblem(
            "an NVIDIA driver is installed, but JAX runs on the CPU",
            'pip install "jax[cuda13]". If JAX has CUDA support already, see the error with: JAX_PLATFORMS=cuda '
            "python -c 'import jax; jax.devices()'. Often the cause is CUDA_VISIBLE_DEVICES, or a driver that is too "
            "old for the plugin's CUDA",
        )
    ]


def _check_settings() -> Iterator[SetupProblem]:
    import jax

    for setting, (consequence, remedy) in _SETTINGS.items():
        if value := getattr(jax.config, setting, None):
            yield SetupProblem(f"{setting} is {value}: {consequence}", remedy)


def nvidia_driver() -> bool:
    """Return whether this machine or container has an NVIDIA driver."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def _summary(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
