"""Context managers that extend the keys of JAX's own trace caches.

A new context manager extends all keys, so functions that were jitted earlier are traced and compiled again. To limit
this to one time, all context managers are created together, when the first name of the package is used (such as
``jaxmp.get_policy``). An import from a submodule, such as ``from jaxmp.optim.loss_scale import …``, does not create
them.
"""

from __future__ import annotations

from typing import Any

import jax

decided: Any = jax.make_user_context(default_value=None)
"""The settings of the engine that is tracing. Functions that were traced without it are traced again."""
float32_caller: Any = jax.make_user_context(default_value=None)
"""The class of the float32 NNX module that is calling. A jitted function returns float32 to code traced in float32."""
policies_off: Any = jax.make_user_context(default_value=False)
"""True while code is traced as written: every policy and every autocast is then the identity."""
assumed_hardware: Any = jax.make_user_context(default_value=None)
"""The short name of the GPU to compile for; None for the attached device."""
