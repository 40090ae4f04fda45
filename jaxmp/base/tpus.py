"""The table of TPUs: name, memory, peak rates, clock and links.

To add a TPU, add a row to :data:`TPUS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Tpu:
    """A TPU that need not be attached.

    All figures are for one JAX device. A device is a whole chip, or half a chip of the generation TPU7x. The rates are
    the vendor's, for dense operands. A rate is None if the chip multiplies these operands no faster than bfloat16.

    Attributes:
      generation: the short name, with which the compiler describes the TPU.
      device_kind: the name that JAX reports.
      memory_gib: the GiB of memory that the compiler gives to a program, a little less than the vendor's figure.
      bandwidth_gb: the GB/s between memory and chip.
      bfloat16: the TFLOP/s of bfloat16. Float32 products of JAX's default precision run at the same rate, because their
        operands are rounded to bfloat16.
      float8: the TFLOP/s of float8.
      int8: the TOP/s of int8.
      clock_ghz: the clock at which the chip reaches the peak rate.
      link_gb: the GB/s that a device can send to its neighbours, over all its links.
      axes: the number of axes of a slice, such as 3 for a torus of 4 × 4 × 4 chips.
      devices_per_chip: the number of JAX devices in a chip.
      cores_per_chip: the number of TensorCores in a chip. The number in Google Cloud's name of a slice, such as
        ``"v5p-128"``, counts TensorCores.
      source: the title of the vendor's page with the figures.
      core_memory_mib: the MiB of vector memory (VMEM) in a core, where operands of a kernel may stay between kernels.
      chip_config: the compiler's name for this use of the chip; empty for its default.
    """

    generation: str
    device_kind: str
    memory_gib: float
    bandwidth_gb: int
    bfloat16: float
    float8: float | None
    int8: float | None
    clock_ghz: float
    link_gb: int
    axes: int
    devices_per_chip: int
    cores_per_chip: int
    source: str
    core_memory_mib: int
    chip_config: str = ""

    @property
    def platform(self) -> str:
        """Return JAX's name of the backend."""
        return "tpu"

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of memory."""
        return int(self.memory_gib * 2**30)

    @property
    def core_memory_bytes(self) -> int:
        """Return the bytes of vector memory in a core."""
        return self.core_memory_mib * 2**20

    @property
    def bandwidth(self) -> int:
        """Return the bytes per second between memory and chip."""
        return self.bandwidth_gb * 10**9

    @property
    def tflops(self) -> dict[str, float]:
        """Return the TFLOP/s by dtype (TOP/s for int8)."""
        rates = {
            "bfloat16": self.bfloat16,
            "float8_e4m3fn": self.float8,
            "float8_e5m2": self.float8,
            "int8": self.int8,
        }
        return {dtype: float(rate) for dtype, rate in rates.items() if rate is not None}

    def slice_of(self, chips: int) -> str:
        """Return the name of a slice with so many chips, as close to a square or a cube as possible.

        >>> TPUS["v5e"].slice_of(16)
        'v5e:4x4'
        """
        shape = [1] * self.axes
        for factor in _prime_factors(chips):
            shape[shape.index(min(shape))] *= factor
        shape.sort(key=lambda size: (size == 1, size))  # the compiler has a slice of 2x2x1 chips, but none of 1x2x2
        return f"{self.generation}:{'x'.join(map(str, shape))}"


def _prime_factors(number: int) -> list[int]:
    """Return the prime factors of a positive number, largest first."""
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors[::-1]


# Columns: name, device kind, GiB, GB/s; TFLOP/s in bfloat16, float8, int8; clock in GHz, GB/s of the links, axes,
# devices of a chip, TensorCores of a chip; source, MiB of VMEM. The memory is what libtpu 0.0.42 names when a program
# does not fit. The clock is the peak rate divided by the FLOPs of a cycle. The page on TPU7x gives the figures of a
# chip, which is two devices. The MiB of VMEM are those of JAX 0.10.2 (jax/_src/pallas/mosaic/tpu_info.py).
TPUS: Mapping[str, Tpu] = {
    row.generation: row
    for row in (
        Tpu("v4", "TPU v4", 30.75, 1228, 275, None, 275, 1.05, 300, 3, 1, 2, "Cloud TPU v4", 16, "megacore"),
        Tpu("v5e", "TPU v5 lite", 15.75, 819, 197, None, 393, 1.5, 200, 2, 1, 1, "Cloud TPU v5e", 128),
        Tpu("v5p", "TPU v5", 95.74, 2765, 459, None, 918, 1.75, 600, 3, 1, 2, "Cloud TPU v5p", 64),
        Tpu("v6e", "TPU v6 lite", 31.25, 1638, 918, None, 1836, 1.75, 400, 2, 1, 1, "Cloud TPU v6e", 128),
        Tpu("tpu7x", "TPU7x", 94.75, 3690, 1153.5, 2307, None, 2.2, 300, 3, 2, 2, "Cloud TPU7x (Ironwood)", 64),
    )
}
"""The TPUs with known figures, by short name."""
