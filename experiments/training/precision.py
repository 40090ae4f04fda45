"""Read the flags of precision into policies, overrides and loss scales."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxmp
from jaxmp.base.dtypes import closest_names
from jaxmp.policy.patterns import UnmatchedOverrideError

# The loss scale of each of Apex's opt levels. O3, with float16 params, has none.
OPT_LEVELS = {"O0": "none", "O1": "dynamic", "O2": "dynamic", "O3": "none"}

_KINDS: dict[str, type] = {
    "none": jaxmp.NoOpLossScale,
    "static": jaxmp.StaticLossScale,
    "dynamic": jaxmp.DynamicLossScale,
    "headroom": jaxmp.HeadroomLossScale,
}
_NO_FLAGS = ("counter", "countdown", "running_max", "dtype")  # fields that change during training, or are not numbers


def read_policy(policy: str, loss_scale: str, opt_level: str | None = None) -> tuple[Any, Any, str]:
    """Return the policy, the loss scale, and the text of the loss scale.

    An opt level names a policy and, if ``loss_scale`` is ``auto``, also Apex's loss scale of that level. Without an opt
    level, ``auto`` is dynamic if the policy computes in float16, else none.

    Raises:
      ValueError: a name is unknown, a value is out of range, or there are both a policy and an opt level.
    """
    if opt_level is not None:
        if policy != "auto":
            raise ValueError(
                f"--opt-level names a policy, as --policy does, got --opt-level {opt_level} and --policy {policy}; "
                "leave out one of them"
            )
        automatic = OPT_LEVELS[opt_level]
        chosen = jaxmp.get_policy("mixed_float16" if opt_level == "O1" else opt_level)
    elif policy.strip().upper() == "O1":
        raise ValueError(
            "--policy says which dtypes modules have, but O1 is autocast; use --opt-level O1, or --policy "
            "mixed_float16 and --autocast (autocast:mixed_float16 in compare)"
        )
    else:
        chosen = jaxmp.get_policy(policy)
        automatic = "dynamic" if compute_dtype(chosen) == jnp.float16 else "none"
    text = automatic if loss_scale == "auto" else loss_scale
    return chosen, read_loss_scale(text), text


class Precision(NamedTuple):
    """The precision that the flags name.

    Attributes:
      policy: a Policy or a PolicyMap.
      loss_scale: a loss-scale object.
      loss_scale_text: the loss scale, as the flag ``--loss-scale`` names it.
      autocast: the arguments of :func:`jaxmp.autocast` for the loss function; empty without autocast.
    """

    policy: Any
    loss_scale: Any
    loss_scale_text: str
    autocast: dict[str, Any]

    @property
    def module_policy(self) -> Any:
        """Return the policy of the modules; None under autocast."""
        return None if self.autocast else self.policy

    def input_dtype(self, config: Any) -> str:
        """Return the dtype of images.

        Usually it is the compute dtype, because the first module would round the images to this dtype anyway. With an
        override or under autocast it is float32, because the first module may then compute in float32.
        """
        return "float32" if config.override or self.autocast else compute_dtype(self.policy).name

    def under_autocast(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return the loss function, under autocast if the flags say so."""
        return jaxmp.autocast(loss_fn, **self.autocast) if self.autocast else loss_fn

    def description(self, origin: str) -> dict[str, str]:
        """Return the record of precision and data for the run's summary."""
        return {
            "policy": str(self.policy),
            "loss_scale_rule": self.loss_scale_text,
            "data": origin,
            "autocast": "yes" if self.autocast else "no",
        }


def read_precision(config: Any) -> Precision:
    """Read the flags of precision.

    Raises:
      ValueError: a value is unknown, or two flags do not go together.
    """
    policy, loss_scale, text = read_policy(config.policy, config.loss_scale, config.opt_level)
    autocast = read_autocast(config.autocast, config.opt_level, policy, config.override)
    return Precision(policy, loss_scale, text, autocast)


def read_autocast(autocast: bool, opt_level: str | None, policy: Any, override: tuple[str, ...]) -> dict[str, Any]:
    """Return the arguments of :func:`jaxmp.autocast` for the loss function.

    Args:
      autocast: the flag ``--autocast``.
      opt_level: the flag ``--opt-level``. O1 also means autocast.
      policy: the policy from :func:`read_policy`.
      override: ``PATTERN=POLICY`` texts. Their policies must compute in float32 or in the compute dtype of ``policy``.

    Returns:
      The arguments; an empty dict without autocast.

    Raises:
      ValueError: autocast cannot do what the flags ask for.
    """
    if not autocast and opt_level != "O1":
        return {}
    if opt_level not in (None, "O1"):
        raise ValueError(
            f"--autocast decides for each operation and --opt-level {opt_level} for each module, got both; leave out "
            "one of them, or use --opt-level O1, which is autocast in float16"
        )
    if isinstance(policy, jaxmp.PolicyMap):
        raise ValueError(f"--autocast takes one policy, got {policy}; name the exceptions with --override")
    if policy.compute_dtype == jnp.float32 or policy.param_dtype != jnp.float32:
        raise ValueError(
            "--autocast computes float32 params in half precision, got a policy of "
            f"{policy.param_dtype.name} params that computes in {policy.compute_dtype.name}; use --policy "
            "mixed_bfloat16 or mixed_float16, or leave out --autocast"
        )
    overrides = {}
    for pattern, text in read_overrides(override).items():
        dtype = compute_dtype(jaxmp.get_policy(text))
        if dtype not in (jnp.float32, policy.compute_dtype):
            raise ValueError(
                f"under autocast an override computes in float32 or in {policy.compute_dtype.name}, got "
                f"'{pattern}={text}'; write '{pattern}=float32', for example"
            )
        overrides[pattern] = "float32" if dtype == jnp.float32 else policy
    return {"policy": policy, "overrides": overrides}


def read_low_precision(inner: Any, low_precision: str, seed: int) -> Any:
    """Wrap the optimizer ``inner`` for ``--low-precision``.

    With ``none``, ``inner`` is returned.
    """
    if low_precision == "none":
        return inner
    if low_precision in ("kahan", "stochastic"):
        return jaxmp.low_precision(inner, rounding=low_precision, seed=seed)
    return jaxmp.low_precision(inner, moments=low_precision, seed=seed)


def require_matches(experiment: Any) -> None:
    """Trace the evaluation step under autocast, to find unmatched overrides.

    An override that matches nothing is then an error at once.

    Raises:
      ValueError: an override matches nothing.
    """
    state = jax.eval_shape(experiment.init, 0)
    jax.eval_shape(experiment.eval_step, state, next(iter(experiment.test_batches())))


def split_overrides(autocast: dict[str, Any], functions: Sequence[tuple[Callable[..., Any], Any]]) -> list[Any]:
    """Return autocast's arguments for each of several loss functions.

    Each loss function gets the overrides that match in it. The functions may call different methods of a model, whose
    operations have different paths.

    Args:
      autocast: the result of :func:`read_autocast`.
      functions: each loss function with its arguments, as arrays or ShapeDtypeStructs. Each loss function is traced for
        each override.

    Raises:
      UnmatchedOverrideError: an override matches in none of the functions. The error is a ValueError.
    """
    of_functions: list[dict[str, str]] = [{} for _ in functions]
    for pattern, kind in autocast["overrides"].items():
        errors = []
        for overrides, (function, args) in zip(of_functions, functions, strict=True):
            try:
                jax.eval_shape(jaxmp.autocast(function, autocast["policy"], overrides={pattern: kind}), *args)
            except UnmatchedOverrideError as error:
                errors.append(error)
            else:
                overrides[pattern] = kind
        if len(errors) == len(of_functions):
            raise errors[0]
    return [{**autocast, "overrides": overrides} for overrides in of_functions]


def compute_dtype(policy: Any) -> Any:
    """Return the compute dtype of a policy.

    For a PolicyMap, return the compute dtype of the root policy.
    """
    return (policy.root if isinstance(policy, jaxmp.PolicyMap) else policy).compute_dtype


def read_loss_scale(text: str) -> Any:
    """Return the loss scale that ``text`` names.

    Examples are ``none``, ``static:4096``, ``dynamic`` and ``headroom``. Parameters of the loss scale follow after a
    colon, as in ``dynamic:loss_scale=1024,period=100``. The first parameter needs no name.

    Raises:
      ValueError: the kind or a parameter is unknown, or a value out of range.
    """
    kind, _, rest = text.strip().partition(":")
    if kind not in _KINDS:
        known = closest_names(kind, _KINDS)
        raise ValueError(f"unknown loss scale {text!r}; known, nearest first: {known}; write static:4096, for example")
    names = [field.name for field in dataclasses.fields(_KINDS[kind]) if field.init and field.name not in _NO_FLAGS]
    values: dict[str, Any] = {}
    for position, part in enumerate(filter(None, rest.split(","))):
        name, _, value = part.partition("=") if "=" in part or position or not names else (names[0], "=", part)
        if name not in names:
            known = closest_names(name, names) if names else "none at all"
            raise ValueError(f"the loss scale {kind!r} has no parameter {part!r}; its parameters: {known}")
        try:
            number = float(value)
        except ValueError:
            raise ValueError(f"a loss scale's parameters are numbers, got {part!r} in {text!r}") from None
        values[name] = int(number) if number.is_integer() and name in ("period", "hysteresis") else number
    if kind == "static" and not values:
        raise ValueError("a static loss scale needs its value, got 'static'; write static:4096")
    return _KINDS[kind](**values)


def read_overrides(texts: tuple[str, ...]) -> dict[str, str]:
    """Return ``PATTERN=POLICY`` texts as a dictionary of overrides.

    The dictionary is an argument of :func:`jaxmp.linen.apply_policy`.

    Raises:
      ValueError: a text is not of this form.
    """
    overrides = {}
    for text in texts:
        pattern, equals, policy = text.partition("=")
        if not (pattern and equals and policy):
            raise ValueError(f"an override is PATTERN=POLICY, got {text!r}; write '**/Dense_1=float32', for example")
        overrides[pattern] = policy
    return overrides
