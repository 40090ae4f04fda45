"""Look up a GPU or a TPU by name in the tables of :mod:`jaxmp.base.gpus` and :mod:`jaxmp.base.tpus`."""

from __future__ import annotations

import re

from jaxmp.base.dtypes import closest_names
from jaxmp.base.gpus import GPUS, Gpu
from jaxmp.base.tpus import TPUS, Tpu

ACCELERATORS: dict[str, Gpu | Tpu] = {**GPUS, **TPUS}
"""The GPUs and TPUs with known figures, by short name."""
# A device kind must match exactly, because a MIG slice or a laptop GPU has other rates.
BY_DEVICE_KIND = {device.device_kind: device for device in ACCELERATORS.values()}


_PRODUCTS = {"v5litepod": "v5e", "trillium": "v6e", "ironwood": "tpu7x"}
"""The short names of TPUs by the names under which the vendor sells them."""


def accelerator_named(name: str) -> Gpu | Tpu:
    """Return the GPU or TPU with a short name in :data:`ACCELERATORS`, or with a full name.

    Case, spaces, hyphens and the words "NVIDIA", "Tesla", "GeForce" and "RTX" are ignored. The name of a TPU may begin
    with "TPU", and may end in the shape of a slice, such as ``"v5e:4x4"``.

    Raises:
      ValueError: the name is unknown, or is Google Cloud's name of a slice, such as ``"v5e-16"``.

    >>> accelerator_named("RTX 4090") is accelerator_named("NVIDIA GeForce RTX 4090") is accelerator_named("4090")
    True
    >>> accelerator_named("TPU v5 lite") is accelerator_named("v5e:4x4") is accelerator_named("v5e")
    True
    """
    chip, colon, slice_shape = str(name).partition(":")
    by_name = {_bare(device.device_kind): device for device in ACCELERATORS.values()}
    by_name |= {_bare(short): device for short, device in ACCELERATORS.items()}
    by_name |= {f"tpu{short}": tpu for short, tpu in TPUS.items()}
    by_name |= {product: TPUS[short] for product, short in _PRODUCTS.items()}
    device = by_name.get(_bare(chip))
    is_slice = isinstance(device, Tpu) and re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", slice_shape)
    if device is None and (in_cloud := re.fullmatch(r"(.+)-(\d+)", chip)):
        tpu = by_name.get(_bare(in_cloud[1]))
        if isinstance(tpu, Tpu):
            chips = int(in_cloud[2]) // tpu.cores_per_chip
            raise ValueError(
                f"a slice of TPUs is named by its chips along each axis, got {name!r}; write {tpu.slice_of(chips)!r}"
            )
    if device is None or (colon and not is_slice):
        raise ValueError(
            "device must be None, for the attached device, or the name of a known GPU or TPU, got "
            f"{name!r}; nearest: {closest_names(_bare(chip), ACCELERATORS, 4)}. A slice of TPUs is written as in "
            "'v5e:4x4'. To add a device, add a row to jaxmp/base/gpus.py or tpus.py"
        )
    return device


def _bare(name: str) -> str:
    return re.sub(r"nvidia|tesla|geforce|rtx|[\s_-]", "", name.lower())
