"""Count the values of every n-th step of a training run by magnitude."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jaxmp.inspect._numerics.numerics import Numerics, numerics, read_records
from jaxmp.inspect.counts.counting_step import CountingStep
from jaxmp.inspect.counts.step_records import TENSORS, StepRecords
from jaxmp.inspect.program.calls import require_own_settings
from jaxmp.nnx.training import TrainStep as NNXTrainStep
from jaxmp.training.step import TrainStep


class Watch:
    """A watch that counts the values of every n-th step by magnitude.

    Call a watch of a train step in place of the train step. The watch takes the step and returns the step's results.
    For every n-th step, the watch runs a program that also counts values. Up to rounding, this program has the same
    results as the train step. No call waits for the device. The counts are read when a later call finds them ready, or
    when you read ``steps``.

    Args:
      loss_fn: a loss function, as for :func:`jaxmp.inspect.numerics`; or a train step, the result of
        :func:`jaxmp.make_train_step` or :func:`jaxmp.nnx.make_train_step`. You call the watch with the number of the
        step, followed by the arguments of the loss function or the train step.
      every: the watch counts the steps whose number is a multiple of ``every``.
      policy: as for :func:`jaxmp.inspect.numerics`; not allowed for a train step.
      tx: as for :func:`jaxmp.inspect.numerics`; not allowed for a train step.

    Attributes:
      counting: the train step that also counts values; None for a loss function. You can pass this train step to
        ``jaxmp.inspect.roofline`` and other tools.

    Raises:
      ValueError: ``every`` is not a positive int, or ``policy`` or ``tx`` is set for a train step.

    >>> watch = Watch(lambda params, x: jnp.sum(x * params), every=100)
    >>> for step in range(1, 201):
    ...     numerics = watch(step, jnp.float32(2), jnp.ones(3))
    >>> list(watch.steps), numerics.loss
    ([100, 200], 6.0)

    >>> train = jaxmp.make_train_step(lambda params, model_state, x, rng: (jnp.sum((x * params) ** 2), model_state))
    >>> state, watch = jaxmp.TrainState.create(params=jnp.ones(3), tx=optax.sgd(0.1)), Watch(train, every=2)
    >>> for step in range(1, 5):
    ...     state, metrics = watch(step, state, jnp.ones((4, 3)))
    >>> {step: round(numerics.loss, 6) for step, numerics in watch.steps.items()}
    {2: 0.48, 4: 0.000768}
    """

    def __init__(self, loss_fn: Callable[..., Any], *, every: int, policy: Any = None, tx: Any = None) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a positive int, got {every!r}; every=100 watches every 100th step")
        self.every = every
        self._steps: dict[int, Numerics] = {}
        self._unread: dict[int, tuple[StepRecords, Any]] = {}
        self._plain_step = loss_fn
        self._watched_step: Callable[..., Any]
        self.counting: CountingStep | None = None
        if isinstance(loss_fn, NNXTrainStep):
            counting: Any = CountingStep(loss_fn.of_trees)
            self.counting = counting
            self._watched_step = NNXTrainStep(counting)
        elif isinstance(loss_fn, TrainStep):
            self._watched_step = self.counting = CountingStep(loss_fn)
        else:
            self._watched_step = numerics(loss_fn, policy=policy, tx=tx)
        if self.counting is not None:
            require_own_settings(policy=policy, tx=tx)

    @property
    def steps(self) -> dict[int, Numerics]:
        """Wait for the watched steps, and return their :class:`Numerics` by number."""
        self._read(wait=True)
        return self._steps

    def __call__(self, step: int, *args: Any, **kwargs: Any) -> Any:
        """Take a step, and count its values if ``step`` is a multiple of ``every``.

        Args:
          step: the number of the step.
          *args: the arguments of the train step or of the loss function.
          **kwargs: for a loss function, ``opt_state=None`` and ``loss_scale=1.0``.

        Returns:
          The results of the train step. For a loss function, the :class:`Numerics` of the step, or None if the step is
          not watched.
        """
        is_watched = step % self.every == 0
        if self.counting is None:
            if not is_watched:
                return None
            self._steps[step] = self._watched_step(*args, **kwargs)
            return self._steps[step]
        self._read(wait=False)
        if not is_watched:
            return self._plain_step(*args, **kwargs)
        result = self._watched_step(*args, **kwargs)
        assert self.counting.records is not None
        self._unread[step] = self.counting.records, self.counting.loss_scale
        return result

    def take(self, wait: bool = True) -> dict[int, Numerics]:
        """Return the :class:`Numerics` of the watched steps, and forget these steps.

        Args:
          wait: whether to wait for the device. If False, only the steps that are ready are returned.
        """
        self._read(wait)
        steps, self._steps = self._steps, {}
        return steps

    def _read(self, wait: bool) -> None:
        while self._unread:
            step, (records, scale) = next(iter(self._unread.items()))
            if not wait and not scale.is_ready():
                break
            # A scale that is not a power of two counts as the next lower power of two.
            self._steps[step] = read_records(records, math.floor(math.log2(float(scale))))
            del self._unread[step]

    def scalars(self, step: int | None = None, dtype: Any = "float16") -> dict[str, float]:
        """Return the counts of a watched step as a flat dict of floats, for a tracker such as TensorBoard.

        The names in the dict are:

        - ``KIND/vanished/PATH``: the share of values that become 0 in ``dtype``, as in :meth:`shares`;
        - ``KIND/zeros/PATH``: the share of values that are 0;
        - ``updates/ratio/PATH``: the norm of a param's update divided by the norm of the param;
        - ``not_finite``: the number of values that are infinite or NaN;
        - ``recommended_scale``: the loss scale with which the fewest gradients become 0 in ``dtype``.

        KIND is ``activations``, ``activation_gradients``, ``gradients`` or ``updates``.

        Args:
          step: the number of the step; None for the last watched step.
          dtype: the dtype for which underflow is counted.

        Returns:
          The dict; it is empty if the step was not watched. For a watched step, the call waits for the device.

        >>> watch = Watch(lambda params, x: 1e-9 * jnp.sum(x * params), every=2)
        >>> for step in (1, 2, 3):
        ...     _ = watch(step, jnp.float32(2), jnp.ones(3))
        >>> watch.scalars(2)["gradients/vanished"], watch.scalars(3)
        (1.0, {})
        """
        if step is not None and step % self.every:
            return {}  # without waiting for the device
        number = step if step is not None else next(reversed(self.steps), None)
        return scalars_of(self.steps[number], dtype) if number in self.steps else {}

    def shares(self, kind: str = "activation_gradients", dtype: Any = "float16") -> dict[str, list[float]]:
        """Return the shares of values that become 0 in ``dtype``, by path.

        Each list has one share for each watched step. Gradients are first multiplied by the loss scale of their step.
        """
        vanished = [vanished_shares(step, kind, dtype) for step in self.steps.values()]
        paths = dict.fromkeys(path for shares in vanished for path in shares)
        return {path: [shares.get(path, 0.0) for shares in vanished] for path in paths}


def vanished_shares(step: Numerics, kind: str, dtype: Any) -> dict[str, float]:
    """Return the share of values that become 0 in ``dtype``, by path.

    Gradients are first multiplied by the loss scale of the step.
    """
    scale = step.loss_scale if kind.endswith("gradients") else 1.0
    shares = {}
    for path, tensor in getattr(step, kind).items():
        shares[path] = tensor.under(dtype, scale).vanished / max(tensor.count, 1)
    return shares


def zero_shares(step: Numerics, kind: str) -> dict[str, float]:
    """Return the share of values that are 0, by path."""
    return {path: tensor.zeros / max(tensor.count, 1) for path, tensor in getattr(step, kind).items()}


def scalars_of(step: Numerics, dtype: Any = "float16") -> dict[str, float]:
    """Return the counts of a watched step as numbers with names: see :meth:`Watch.scalars`."""
    scalars = {
        "recommended_scale": step.recommended_scale(dtype),
        "not_finite": float(sum(tensor.overflow for _, _, tensor in step.rows())),
    }
    for kind in TENSORS:
        if kind == "weights":
            continue
        for name, shares in (("vanished", vanished_shares(step, kind, dtype)), ("zeros", zero_shares(step, kind))):
            scalars |= {_joined(kind, name, path): share for path, share in shares.items()}
    for path, tensor in step.updates.items():
        if tensor.ratio is not None:
            scalars[_joined("updates", "ratio", path)] = float(tensor.ratio)
    return scalars


def _joined(*names: str) -> str:
    """Return a name with slashes; the result of a function without modules has an empty path."""
    return "/".join(filter(None, names))
