"""Loss scales, which keep small gradients from becoming zero in float16.

In float16, values below 2^-25 become zero, and gradients are often that small. Multiplying the loss by S multiplies
every gradient of the backward pass by S. The gradients are divided by S in float32 before the optimizer sees them
(Micikevicius et al. 2017, "Mixed Precision Training", arXiv 1710.03740). In this module, a finite step is a step whose
gradients are all finite. There are four ways to choose S:

- :class:`NoOpLossScale`: no scaling, for bfloat16 and float32, which have a large enough range.
- :class:`StaticLossScale`: a fixed S.
- :class:`DynamicLossScale`: S grows after a series of finite steps, and backs off at a non-finite step.
- :class:`HeadroomLossScale`: S follows the largest gradient, so that overflows are rare.

A loss scale is an immutable pytree. The next S is computed in float32, on the device and without branches. So the
device does not wait for the host, and a new value of S does not recompile the step. S is a constant in derivatives.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxmp.base.arguments import printed
from jaxmp.base.dtypes import at_least_float32, canonical_dtype
from jaxmp.optim.loss_scale_state import HUGE, TINY, ScaleState, is_concrete, register, require

T = TypeVar("T")


class LossScale:
    """The base class of loss scales.

    To write your own loss scale, subclass it with a dataclass that has a field ``loss_scale``. If the scale changes,
    add a method ``adjust`` that returns a new object. The instances are pytrees that pickle and Flax can save. If you
    register the class with JAX or Flax yourself, your registration is used.

    Attributes:
      loss_scale: the factor S by which the loss is multiplied, a scalar.
      needs_grad_max: whether ``adjust`` needs its argument ``grad_max``.
      static_fields: the names of the fields that are static; their values must be hashable. All other fields are leaves
        of the pytree.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Halving(LossScale):  # backs off, never grows
    ...     loss_scale: jax.typing.ArrayLike
    ...
    ...     def adjust(self, grads_finite, grad_max=None):
    ...         return Halving(jnp.where(grads_finite, self.loss_scale, self.loss_scale / 2))
    >>> tx = jaxmp.loss_scaling(optax.sgd(0.1), Halving(2.0**10))
    >>> _, opt_state = jax.jit(tx.update)(jnp.array([jnp.nan]), tx.init(jnp.ones(1)))
    >>> print(jaxmp.get_loss_scale(opt_state).loss_scale)
    512.0
    """

    needs_grad_max: ClassVar[bool] = False
    static_fields: ClassVar[tuple[str, ...]] = ()
    loss_scale: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Register a dataclass as a pytree.

        Raises:
          TypeError: an argument has the name of an argument of torch's GradScaler.
        """
        _require_names_of_jaxmp(cls, kwargs)
        register(cls)  # type: ignore[arg-type]
        return super().__new__(cls)

    def scale(self, tree: T) -> T:
        """Multiply ``tree`` by S.

        Floating and complex leaves keep their dtype (half-precision leaves are multiplied in float32). A Python float
        becomes an array. Integers, bools, keys and everything else are unchanged.
        """

        def times(x: jax.Array) -> jax.Array:
            wide = at_least_float32(x.dtype)
            return (x.astype(wide) * _untrained(self.loss_scale, wide)).astype(x.dtype)

        return _map_inexact(times, tree)

    def unscale(self, tree: T) -> T:
        """Divide ``tree`` by S.

        The division is exact if S is a power of two and the results are normal numbers. If S is above 2^126, the
        results are NaN, so that :func:`jaxmp.loss_scaling` skips the step. Half-precision leaves become float32,
        because small gradients would become 0 in float16. Wider leaves keep their dtype. Integers, bools, keys and
        everything else are unchanged.

        An infinite gradient stays infinite. Clipping by value would make it finite, so clip only inside of
        :func:`jaxmp.loss_scaling`. (:func:`jaxmp.value_and_grad` returns NaN in place of infinities.)
        """

        def divide(x: jax.Array) -> jax.Array:
            wide = at_least_float32(x.dtype)
            scale = _untrained(self.loss_scale, np.finfo(wide).dtype)
            # The reciprocal of a scale above 2**126 is subnormal, and a device may flush it to zero.
            inverse = jnp.where(scale <= 2.0**126, 1 / scale, jnp.nan)
            return x.astype(wide) * inverse.astype(wide)

        return _map_inexact(divide, tree)

    def is_stuck(self, before: LossScale) -> jax.Array:
        """Return whether the scale failed to fall in a non-finite step.

        ``before`` is the loss scale at the beginning of that step.
        """
        return jnp.asarray(self.loss_scale >= before.loss_scale)

    def adjust(self, grads_finite: ArrayLike, grad_max: ArrayLike | None = None) -> Self:
        """Return the loss scale of the next step.

        Args:
          grads_finite: whether all gradients of this step were finite: a Python bool or a boolean scalar. Under
            ``vmap`` each example has its own flag and its own scale.
          grad_max: the largest absolute value of the true (unscaled) gradients of this step, a scalar. It is used only
            if ``needs_grad_max`` is true and the value is finite.

        Raises:
          ValueError: ``grads_finite`` is not a boolean scalar, or ``grad_max`` is needed and missing.
        """
        return self


_NAMES_OF_OTHERS = {
    "init_scale": "loss_scale",
    "scale": "loss_scale",
    "growth_interval": "period",
    "growth_factor": "factor",
    "backoff_factor": "backoff",
    "minimum_scale": "min_loss_scale",
}
"""The arguments of torch's GradScaler and of Flax's DynamicScale, and their names here."""


def _require_names_of_jaxmp(cls: type, names: Iterable[str]) -> None:
    """Raise a TypeError if an argument of a loss scale has its name in torch or Flax."""
    parameters = inspect.signature(cls).parameters
    for name in names:
        new_name = _NAMES_OF_OTHERS.get(name)
        if name not in parameters and new_name in parameters:
            raise TypeError(
                f"{cls.__name__} got the argument {name!r}, which is called {new_name!r} here; write {new_name}=..."
            )


@dataclasses.dataclass(frozen=True)
class NoOpLossScale(LossScale):
    """No loss scaling; ``scale`` and ``unscale`` return their argument unchanged.

    >>> NoOpLossScale().scale({"loss": 3.0})
    {'loss': 3.0}
    """

    loss_scale: int = dataclasses.field(default=1, init=False)

    static_fields = ("loss_scale",)

    def scale(self, tree: T) -> T:
        """Return ``tree``."""
        return tree

    def unscale(self, tree: T) -> T:
        """Return ``tree``."""
        return tree


@dataclasses.dataclass(frozen=True)
class StaticLossScale(LossScale):
    """A fixed loss scale, which is a constant in the compiled program.

    Attributes:
      loss_scale: the factor, positive and in float32's normal range. Scaling by a power of two is exact.

    Raises:
      ValueError: the scale is outside float32's normal range, or it is a tracer.

    >>> StaticLossScale(1024).scale(3.0)
    Array(3072., dtype=float32)
    """

    loss_scale: Any

    static_fields = ("loss_scale",)

    def __post_init__(self) -> None:
        self.__dict__["loss_scale"] = float(require("loss_scale", self.loss_scale))


@dataclasses.dataclass(frozen=True)
class DynamicLossScale(ScaleState, LossScale):
    """A loss scale that grows after finite steps and backs off at non-finite ones.

    After ``period`` finite steps in a row, the scale is multiplied by ``factor``. A non-finite step multiplies the
    scale by ``backoff`` and restarts the count of finite steps. The scale never falls below ``min_loss_scale``. If
    growth would exceed ``max_loss_scale``, the scale does not grow, so a power of two stays a power of two. torch's
    GradScaler has no bounds, and its scale can reach 0. As long as no bound is reached, a DynamicLossScale and a
    GradScaler with the same parameters have the same scales. They are equal bit for bit if float32 represents
    ``factor`` and ``backoff`` exactly.

    If ``hysteresis`` is h > 1, the first h - 1 non-finite steps do not change the scale. The h-th non-finite step and
    all later ones multiply the scale by ``backoff``. The count of non-finite steps restarts after ``period`` finite
    steps in a row. Megatron-LM's ``DynamicGradScaler`` has the same rule, and so does DeepSpeed with
    ``consecutive_hysteresis`` off.

    Attributes:
      loss_scale: the scale, a float32 scalar; a leaf.
      counter: the number of finite steps in a row so far, an int32 scalar; a leaf.
      period: the number of finite steps in a row after which the scale grows; you may lower it during a run.
      factor: the factor of growth, above 1. Powers of two are exact.
      min_loss_scale: the lower bound; 0 means 2^-126, float32's smallest normal number.
      backoff: the factor of a backoff, between 0 and 1; None means ``1 / factor``.
      max_loss_scale: the upper bound.
      hysteresis: the first non-finite step, counted from 1, that lowers the scale. With 1, every non-finite step lowers
        the scale.
      countdown: the number of non-finite steps that are left until the scale backs off, an int32 scalar; a leaf. If
        ``hysteresis`` is 1, ``countdown`` is None.

    Raises:
      ValueError: a number is outside its range, or the scale is outside its bounds. Tracers are not checked.

    >>> scale = DynamicLossScale(2**15, period=2)
    >>> for finite in (True, True, False):
    ...     scale = scale.adjust(finite)
    ...     print(int(scale.loss_scale), int(scale.counter))
    32768 1
    65536 0
    32768 0
    """

    loss_scale: Any = 2.0**15
    counter: Any = 0
    period: int = 2000
    factor: float = 2
    min_loss_scale: Any = 1
    _: dataclasses.KW_ONLY
    backoff: float | None = None
    max_loss_scale: Any = 2.0**24
    hysteresis: int = 1
    countdown: Any = None

    static_fields = ("period", "factor", "min_loss_scale", "backoff", "max_loss_scale", "hysteresis")
    _leaves: ClassVar[Mapping[str, Any]] = {"loss_scale": jnp.float32, "counter": jnp.int32, "countdown": jnp.int32}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hysteresis == 1:
            self.__dict__["countdown"] = None
        elif self.countdown is None:
            self.__dict__["countdown"] = jnp.asarray(self.hysteresis, jnp.int32)
        elif is_concrete(self.countdown) and np.any(self.countdown > self.hysteresis):
            raise ValueError(
                f"countdown must be at most hysteresis, got {self.countdown} and {self.hysteresis}: with None, it "
                "starts at hysteresis"
            )

    def within_bounds(self) -> Self:
        """Return the loss scale with its numbers moved into the bounds of its settings."""
        bounded = super().within_bounds()
        if bounded.countdown is None:
            return bounded
        return bounded._with(countdown=jnp.minimum(bounded.countdown, self.hysteresis))

    def is_stuck(self, before: LossScale) -> jax.Array:
        """See :meth:`LossScale.is_stuck`; False while hysteresis delays the backoff."""
        return super().is_stuck(before) & jnp.asarray(self.countdown is None or self.countdown == 0)

    @classmethod
    def from_torch(cls, state_dict: Mapping[str, Any]) -> Self:
        """Return the loss scale that continues a torch ``GradScaler``.

        As in torch, the only bounds of the scale are those of float32. To set a minimum, write
        ``dataclasses.replace(scale, min_loss_scale=1)``.

        Raises:
          KeyError: an entry is missing, as in the state of a disabled scaler; use :class:`NoOpLossScale` then.
          ValueError: an entry is out of range, such as a scale that fell to 0.

        >>> state = {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
        >>> print(DynamicLossScale.from_torch(state | {"_growth_tracker": 7}).counter)
        7
        """
        names = ("scale", "_growth_tracker", "growth_interval", "growth_factor", "backoff_factor")
        scale, tracker, interval, growth, backoff = (float(state_dict[name]) for name in names)
        return cls(scale, int(tracker), int(interval), growth, 0, backoff=backoff, max_loss_scale=HUGE)

    def adjust(self, grads_finite: ArrayLike, grad_max: ArrayLike | None = None) -> Self:
        """See :meth:`LossScale.adjust`."""
        finite = _flag(grads_finite)
        scale, counter = _untrained(self.loss_scale, jnp.float32), _untrained(self.counter, jnp.int32)
        due = finite & (counter + 1 >= self.period)
        grown = scale * self.factor  # may be inf, which is above any maximum
        backed_off = scale * (1 / self.factor if self.backoff is None else self.backoff)
        new = {"counter": jnp.where(finite & ~due, counter + 1, 0)}
        if self.hysteresis > 1:
            left = _untrained(self.countdown, jnp.int32)
            left = jnp.where(finite, left, jnp.maximum(left - 1, 0))
            backed_off = jnp.where(left > 0, scale, backed_off)
            new["countdown"] = jnp.where(due, self.hysteresis, left)
        moved = jnp.where(finite, jnp.where(due & (grown <= self.max_loss_scale), grown, scale), backed_off)
        new["loss_scale"] = jnp.clip(moved, max(self.min_loss_scale, TINY), self.max_loss_scale)
        return self._with(**new)


@dataclasses.dataclass(frozen=True)
class HeadroomLossScale(ScaleState, LossScale):
    """A power-of-two loss scale that keeps the largest gradient well below overflow.

    The class stores a running maximum of the true gradients' absolute values. A larger gradient raises the maximum at
    once. Otherwise the maximum decays: in ``period`` steps, it halves. The scale is the largest power of two for which
    ``running_max * scale * 2**headroom`` does not exceed the largest number of ``dtype``. So a step overflows only if
    a gradient is more than ``2**headroom`` times the running maximum. (:class:`DynamicLossScale` finds the limit only
    by overflowing from time to time.) In one step, the scale at most doubles.

    A non-finite step halves the scale, and raises the running maximum to the value that fits the new scale. So the
    scale can grow again only after ``period`` steps. The maximum must rise for this reason: it measures only the
    gradients of params, but the overflow may be in the gradient of an activation. A step whose gradients are all zero
    changes nothing. The method is similar to the LogMax scaling of OpenSeq2Seq (Kuchaiev et al. 2018, arXiv
    1805.10387), but a zero gradient does not make the scale NaN.

    Attributes:
      headroom: the base-2 logarithm of the margin before overflow, 0 or more.
      loss_scale: the scale, a float32 scalar; a leaf.
      running_max: the running maximum of the gradients, a float32 scalar, 0 before the first step; a leaf.
      period: the number of steps in which the running maximum decays by half.
      min_loss_scale: the lower bound, a power of two.
      max_loss_scale: the upper bound, a power of two.
      dtype: the name of the dtype that may overflow.

    Raises:
      ValueError: a number is outside its range; the scale or a bound is not a power of two; or the dtype is unknown.

    >>> scale = HeadroomLossScale(headroom=4)  # float16's largest number is 65504, and 65504 / 2**4 is 4094
    >>> for grad_max in (1.0, 0.0, 8.0):
    ...     scale = scale.adjust(True, grad_max)
    ...     print(int(scale.loss_scale))
    2048
    2048
    256
    """

    headroom: float = 4
    _: dataclasses.KW_ONLY
    loss_scale: Any = 2.0**15
    running_max: Any = 0.0
    period: int = 2000
    min_loss_scale: Any = 1
    max_loss_scale: Any = 2.0**24
    dtype: Any = "float16"

    needs_grad_max = True
    static_fields = ("headroom", "period", "min_loss_scale", "max_loss_scale", "dtype")
    _leaves: ClassVar[Mapping[str, Any]] = {"loss_scale": jnp.float32, "running_max": jnp.float32}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.__dict__["dtype"] = canonical_dtype(self.dtype).name
        for name in ("loss_scale", "min_loss_scale", "max_loss_scale"):
            x = vars(self)[name]
            if is_concrete(x) and not np.all(np.frexp(x)[0] == 0.5):
                raise ValueError(f"{name} must be a power of two, got {x}: HeadroomLossScale has no other scales")

    def adjust(self, grads_finite: ArrayLike, grad_max: ArrayLike | None = None) -> Self:
        """See :meth:`LossScale.adjust`."""
        if grad_max is None:
            raise ValueError(
                "HeadroomLossScale needs grad_max, the largest absolute value of the true gradients, got None; call "
                "adjust(grads_finite, grad_max)"
            )
        finite, largest = _flag(grads_finite), _untrained(grad_max, jnp.float32)
        scale, running = _untrained(self.loss_scale, jnp.float32), _untrained(self.running_max, jnp.float32)
        limit = float(jnp.finfo(self.dtype).max) / 2**self.headroom
        has_gradients = (largest > 0) & (largest < jnp.inf)  # a finite step without them changes nothing
        followed = jnp.maximum(largest, running * 2 ** (-1 / self.period))
        fitting = jnp.minimum(_floor_to_power_of_two(limit / jnp.maximum(followed, TINY)), 2 * scale)
        new_scale = jnp.where(finite, jnp.where(has_gradients, fitting, scale), scale / 2)
        new_scale = jnp.clip(new_scale, self.min_loss_scale, self.max_loss_scale)
        raised = jnp.maximum(running, limit / new_scale)  # so that the scale does not grow in the next steps
        new_max = jnp.where(finite, jnp.where(has_gradients, followed, running), raised)
        return self._with(loss_scale=new_scale, running_max=new_max)


def as_loss_scale(x: Any) -> LossScale:
    """Return a loss scale of jaxmp unchanged, and convert a loss scale of jmp.

    Raises:
      TypeError: ``x`` is not a loss scale of jaxmp or jmp.
      ValueError: a number in a loss scale of jmp is outside its range, such as a scale below its minimum.
    """
    if isinstance(x, LossScale):
        return x
    name = type(x).__name__ if type(x).__module__.split(".")[0] == "jmp" else None
    if name == "NoOpLossScale":
        return NoOpLossScale()
    if name == "StaticLossScale":
        return StaticLossScale(x.loss_scale)
    if name == "DynamicLossScale":  # jmp has no maximum
        return DynamicLossScale(x.loss_scale, x.counter, x.period, x.factor, x.min_loss_scale, max_loss_scale=HUGE)
    raise TypeError(
        f"a loss scale must be one of jaxmp's or jmp's, got {printed(x)}; write jaxmp.DynamicLossScale(), or for a "
        "constant scale jaxmp.StaticLossScale(1024.0)"
    )


def _map_inexact(fun: Callable[[jax.Array], jax.Array], tree: T) -> T:
    def visit(x: Any) -> Any:
        number = isinstance(x, (jax.Array, np.ndarray, np.generic, float, complex))
        return fun(jnp.asarray(x)) if number and jnp.issubdtype(getattr(x, "dtype", type(x)), jnp.inexact) else x

    return jax.tree.map(visit, tree)


def _untrained(x: ArrayLike, dtype: Any) -> jax.Array:
    return jax.lax.stop_gradient(jnp.asarray(x, dtype))


def _floor_to_power_of_two(x: jax.Array) -> jax.Array:
    # Clearing the mantissa is exact, unlike exp2(floor(log2(x))); inf stays inf.
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(0x7F800000)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _flag(grads_finite: ArrayLike) -> jax.Array:
    flag = jnp.asarray(grads_finite)
    if flag.dtype != jnp.bool_ or flag.ndim:
        raise ValueError(
            f"grads_finite must be a boolean scalar, got {flag.dtype} of shape {flag.shape}; pass "
            "jaxmp.jmp.all_finite(grads)"
        )
    return flag
