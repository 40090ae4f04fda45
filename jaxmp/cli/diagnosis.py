"""Check whether training works on this machine, for ``jaxmp doctor``."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jaxmp

if TYPE_CHECKING:
    from jaxmp.base.hardware import Hardware

# For each package, the oldest supported version (as in pyproject.toml) and the newest tested version (None: no limit).
SUPPORTED: dict[str, tuple[str, str | None]] = {
    "jax": ("0.10", "0.12"),
    "jaxlib": ("0.10", "0.12"),
    "flax": ("0.12.8", "0.12"),
    "optax": ("0.2.8", None),
    "numpy": ("2.0", None),
}
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
    float8: str = ""  # a sentence about mixed_float8 on the device


def diagnose() -> Report:
    """Check the packages, the settings and the device, and train one step."""
    versions = _versions()
    findings = [*_check_versions(versions), *_check_platforms()]
    try:
        import jax

        devices, hardware = jax.local_device_count(), jaxmp.hardware.detect()
    except Exception as error:  # any error is reported as a finding
        remedy = "see the whole error with: python -c 'import jax; jax.devices()'; a fresh environment often helps"
        findings.append(SetupProblem(f"JAX does not start: {_summary(error)}", remedy))
        return Report(None, 0, False, "not tried: JAX does not start", versions, tuple(findings))
    findings += [*_check_driver(hardware.platform, versions), *_check_settings()]
    trains, training, failures = _try_training(hardware.recommended_policy)
    return Report(hardware, devices, trains, training, versions, (*findings, *failures), float8_on(hardware))


def float8_on(device: Hardware) -> str:
    """Return a sentence about the policy mixed_float8 on a device.

    >>> float8_on(jaxmp.hardware.detect("a100"))
    'NVIDIA A100-SXM4-80GB has no float8 products: mixed_float8 computes in bfloat16 there'
    """
    if "float8_e4m3fn" not in device.tensor_cores:
        return f"{device.name} has no float8 products: mixed_float8 computes in bfloat16 there"
    least = jaxmp.Float8().min_dim
    return (
        f"mixed_float8 computes products in float8 if their weights have at least {least:,} × {least:,} entries; "
        "compare its speed with mixed_bfloat16. The policy 'auto' never means mixed_float8"
    )


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


def _try_training(recommended: str) -> tuple[bool, str, list[SetupProblem]]:
    half = "mixed_bfloat16" if recommended == "float32" else recommended
    failures = []
    for policy in dict.fromkeys((half, recommended)):
        try:
            train_one_step(policy)
        except Exception as error:  # any error is reported as a finding
            traceback = f'python -c "import jaxmp.cli.diagnosis; jaxmp.cli.diagnosis.train_one_step({policy!r})"'
            failures.append(
                SetupProblem(f"one training step under {policy} fails: {_summary(error)}", f"see where: {traceback}")
            )
        else:
            return True, f"works: one step under {policy}, with loss scaling, gave the right numbers", failures
    return False, "does not work", failures[:1]


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version(), "jaxmp": jaxmp.__version__}
    for package in (*SUPPORTED, *_PLUGINS):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            if package in SUPPORTED:
                versions[package] = None
    return versions


def _check_versions(versions: dict[str, str | None]) -> Iterator[SetupProblem]:
    for package, (oldest, newest) in SUPPORTED.items():
        version = versions[package]
        if version is None:
            yield SetupProblem(f"{package} is not installed", f'pip install "{package}>={oldest}"')
        elif _release(version) < _release(oldest):
            yield SetupProblem(
                f"{package} {version} is older than jaxmp supports ({oldest})", f'pip install "{package}>={oldest}"'
            )
        elif newest is not None and _release(version)[:2] > _release(newest):
            yield SetupProblem(
                f"{package} {version} is newer than jaxmp was tested with ({newest})",
                f'if something fails: pip install "{package}=={newest}.*"',
            )
    jax, jaxlib = versions["jax"], versions["jaxlib"]
    if jax and jaxlib and jax != jaxlib:
        yield SetupProblem(
            f"jax {jax} runs with jaxlib {jaxlib}", f'install equal versions: pip install "jax=={jax}" "jaxlib=={jax}"'
        )
    for plugin in _PLUGINS:
        version = versions.get(plugin)
        if version and jaxlib and version != jaxlib:
            yield SetupProblem(
                f"{plugin} {version} does not match jaxlib {jaxlib}: JAX ignores a plugin of another version",
                f'pip install "jax[{plugin.split("-")[1]}]=={jax}"',
            )


def _check_platforms() -> Iterator[SetupProblem]:
    if forced := os.environ.get("JAX_PLATFORMS"):
        yield SetupProblem(
            f"JAX_PLATFORMS={forced} is set: JAX uses no other kind of device",
            "unset JAX_PLATFORMS, unless you want this",
        )


def _check_driver(platform: str, versions: dict[str, str | None]) -> Iterator[SetupProblem]:
    """Report an NVIDIA GPU that JAX does not use.

    If JAX_PLATFORMS is set, nothing is reported here, because :func:`_check_platforms` reports the variable.
    """
    if platform != "cpu" or os.environ.get("JAX_PLATFORMS") or not nvidia_driver():
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        yield SetupProblem(
            f"CUDA_VISIBLE_DEVICES={visible!r} hides the NVIDIA GPU, and JAX runs on the CPU",
            "unset CUDA_VISIBLE_DEVICES, or name a device: CUDA_VISIBLE_DEVICES=0",
        )
    elif any(plugin in versions for plugin in _PLUGINS):
        yield SetupProblem(
            "an NVIDIA driver and JAX's CUDA plugin are installed, but JAX runs on the CPU",
            "see why with: JAX_PLATFORMS=cuda python -c 'import jax; jax.devices()' (often a driver too old for the "
            "plugin's CUDA, or CUDA libraries on LD_LIBRARY_PATH that hide the plugin's own)",
        )
    else:
        jax = versions["jax"]
        yield SetupProblem(
            "an NVIDIA driver is installed, but JAX has no CUDA support: it runs on the CPU",
            f'pip install "jax[cuda13]=={jax}" (for a GPU below compute capability 7.5, or a driver older than 580: '
            f'"jax[cuda12]=={jax}")',
        )


def _check_settings() -> Iterator[SetupProblem]:
    import jax

    for setting, (consequence, remedy) in _SETTINGS.items():
        if value := getattr(jax.config, setting, None):
            yield SetupProblem(f"{setting} is {value}: {consequence}", remedy)


def nvidia_driver() -> bool:
    """Return whether this machine or container has an NVIDIA driver."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def _release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (0, 12, 0) for ``"0.12.0.dev1"``."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _summary(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
