"""Context managers that extend the keys of JAX's own trace caches.

Each of these makes all keys longer from then on, so that what was jitted before is traced and compiled once more: so
all are made together, when the first name of the package is used, ``jaxmp.get_policy`` say. What is imported from a
module below it, by ``from jaxmp.optim.loss_scale import …``, makes none before that.
"""

from __future__ import annotations

from typing import Any

import jax

decided: Any = jax.make_user_context(default_value=None)
"""The settings of the engine that traces: functions jitted and traced without it are traced again in it."""
float32_caller: Any = jax.make_user_context(default_value=None)
"""The class of the float32 NNX module that calls: a jitted function hands out float32 to code that is traced in it."""
policies_off: Any = jax.make_user_context(default_value=False)
"""True while code is traced as its author wrote it: every policy and every autocast is the identity then."""
assumed_hardware: Any = jax.make_user_context(default_value=None)
"""The short name of the GPU that is compiled for; None for the device at hand."""
