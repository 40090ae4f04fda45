"""Context managers that extend the keys of JAX's own trace caches.

When such a context manager is created, JAX extends all keys. Functions that were jitted earlier are then traced and
compiled again. So that this happens only once, jaxmp creates all its context managers in this module. The module is
imported when you first use a name of the package, such as ``jaxmp.get_policy``. An import from a submodule, such as
``from jaxmp.optim.loss_scale import …``, does not create them.
"""

from __future__ import annotations

from typing import Any

import jax

decided: Any = jax.make_user_context(default_value=None)
"""The engine's settings while it traces a function. JAX traces inner jitted functions again for other settings."""
region: Any = jax.make_user_context(default_value="")
"""The scope of the innermost ``jaxmp.precision`` region around the code; empty outside of regions."""
policies_off: Any = jax.make_user_context(default_value=False)
"""True while policies and autocast are switched off, so that the traced code stays unchanged."""
planned: Any = jax.make_user_context(default_value=None)
"""A new object for each cast plan, while its function is traced. So each plan traces inner jitted functions again."""
assumed_hardware: Any = jax.make_user_context(default_value=None)
"""The short name of the GPU to compile for; None for the attached device."""
rounded_params: Any = jax.make_user_context(default_value=False)
"""True while Linen models read params as they would store them: rounded to the param dtype of their policy."""
auto_chunks: Any = jax.make_user_context(default_value=None)
"""The number of chunks of a loss with ``chunks="auto"``; None if it follows the memory of the device."""
