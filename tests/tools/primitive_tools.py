"""List the primitives of the installed JAX.

``jax.extend.core.primitives`` has only about half of the primitives that can occur in a program. So all modules of JAX
are imported and searched.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from jax.extend.core import Primitive

ROOMS = ("jax._src", "jax.experimental")
SKIPPED = {
    "jax._src.pallas.mosaic": "inside TPU kernels, which are opaque; its `gather`, `scatter`, `swap` are not JAX's",
    "jax._src.pallas.mosaic_gpu": "inside GPU kernels, which are opaque",
    "jax._src.pallas.triton": "inside Triton kernels, which are opaque",
    "jax._src.pallas.primitives": "inside kernels of any kind",
    "jax._src.internal_test_util": "JAX's tests",
    "jax._src.public_test_util": "JAX's tests",
    "jax._src.test_util": "JAX's tests; importing them adds options to `jax.config`",
    "jax._src.test_warning_util": "JAX's tests",
    "jax._src.test_loader": "JAX's tests",
    "jax.experimental.jax2tf": "imports TensorFlow",
    "jax.experimental.pallas.ops": "ready-made kernels; they import JAX's tests",
    "jax.experimental.sparse.test_util": "JAX's tests",
}


@functools.cache
def installed_primitives() -> Mapping[str, str]:
    """Return each primitive's name, with the alphabetically first module that has it.

    The call takes seconds and imports hundreds of modules. The modules of ``SKIPPED`` are left out for the reasons that
    it gives. Modules that cannot be imported are left out too, because no program in this process can have their
    primitives.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated modules of JAX warn
        names = sorted(name for room in ROOMS for name in _import_below(room))
    primitives: dict[str, str] = {}
    for name in names:
        for value in vars(sys.modules[name]).values():
            if isinstance(value, Primitive):
                primitives.setdefault(value.name, name)
    return MappingProxyType(dict(sorted(primitives.items())))


def _import_below(name: str) -> Iterator[str]:
    if any(name == skipped or name.startswith(f"{skipped}.") for skipped in SKIPPED):
        return
    try:
        module = importlib.import_module(name)
    except ImportError:
        return
    yield name
    for child in pkgutil.iter_modules(getattr(module, "__path__", ()), f"{name}."):
        yield from _import_below(child.name)
