"""The table of GPUs: name, memory, peak rates, and the figures of the chip that XLA's compiler needs.

To add a GPU, add a row to :data:`GPUS`. A new compute capability also needs a row in :data:`ARCHITECTURES`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The figures that all chips of a compute capability share, from the CUDA programming guide.

    Attributes:
      fpus: the float32 lanes of a multiprocessor.
      shared_kib: the KiB of shared memory of a multiprocessor.
      reserved_kib: the KiB of shared memory that CUDA reserves in each block.
      threads: the maximum number of threads of a multiprocessor.
      feature_extension: the extension of the capability in XLA's description; ``"ACCELERATED_FEATURES"`` means a
        compiler target like sm_90a.
    """

    fpus: int
    shared_kib: int
    reserved_kib: int
    threads: int
    feature_extension: str = "NONE"


ARCHITECTURES: Mapping[tuple[int, int], Architecture] = {
    (7, 0): Architecture(64, 96, 0, 2048),
    (7, 5): Architecture(64, 64, 0, 1024),
    (8, 0): Architecture(64, 164, 1, 2048),
    (8, 6): Architecture(128, 100, 1, 1536),
    (8, 9): Architecture(128, 100, 1, 1536),
    (9, 0): Architecture(128, 228, 1, 2048, "ACCELERATED_FEATURES"),
    (10, 0): Architecture(128, 228, 1, 2048, "ACCELERATED_FEATURES"),
    (12, 0): Architecture(128, 100, 1, 1536),
}
"""The architectures by compute capability."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU that need not be attached.

    The rates are the vendor's, for dense operands (without structured sparsity) and float32 accumulation. A rate is
    None if the chip has no such tensor cores.

    Attributes:
      device_kind: the full name, as CUDA and JAX report it.
      capability: the compute capability, major and minor.
      memory_gib: the GiB of memory that CUDA reports, rounded down.
      bandwidth_gb: the GB/s between memory and chip.
      float32: the TFLOP/s of float32, without tensor cores.
      tensorfloat32: the TFLOP/s of TensorFloat-32.
      half: the TFLOP/s of float16 and, since compute capability 8.0, of bfloat16.
      float8: the TFLOP/s of float8.
      int8: the TOP/s of int8.
      cores: the number of streaming multiprocessors.
      clock_ghz: the highest clock of the multiprocessors.
      l2_mib: the MiB of the L2 cache.
      source: the title of the datasheet or whitepaper with the rates.
      compiler_name: the name in XLA's own description; empty if it is ``device_kind``.
    """

    device_kind: str
    capability: tuple[int, int]
    memory_gib: int
    bandwidth_gb: int
    float32: float
    tensorfloat32: float | None
    half: float
    float8: float | None
    int8: float | None
    cores: int
    clock_ghz: float
    l2_mib: int
    source: str
    compiler_name: str = ""

    @property
    def platform(self) -> str:
        """Return JAX's name of the backend."""
        return "gpu"

    @property
    def compute_capability(self) -> str:
        """Return the compute capability as JAX reports it, such as ``"9.0"``."""
        return "{}.{}".format(*self.capability)

    @property
    def architecture(self) -> Architecture:
        """Return the figures of the compute capability."""
        return ARCHITECTURES[self.capability]

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of memory."""
        return self.memory_gib * 2**30

    @property
    def bandwidth(self) -> int:
        """Return the bytes per second between memory and chip."""
        return self.bandwidth_gb * 10**9

    @property
    def tflops(self) -> dict[str, float]:
        """Return the TFLOP/s by dtype (TOP/s for int8), also of dtypes that older tensor cores lack."""
        halves = {"float16": self.half, "bfloat16": self.half}
        eights = {"float8_e4m3fn": self.float8, "float8_e5m2": self.float8, "int8": self.int8}
        rates = {"float32": self.float32, "tensorfloat32": self.tensorfloat32, **halves, **eights}
        return {dtype: float(rate) for dtype, rate in rates.items() if rate is not None}


_V100, _A100 = "NVIDIA V100 Tensor Core GPU datasheet", "NVIDIA A100 Tensor Core GPU datasheet"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture whitepaper, V2.0"
_ADA = "NVIDIA Ada GPU Architecture whitepaper"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet"

# Columns: device kind, capability, GiB, GB/s; TFLOP/s in float32, TF32, half, float8, int8; multiprocessors, clock in
# GHz, MiB of L2; source. The rates of A40, A100, H100 SXM, L40S, RTX 4090 and B200 (without float32) were compared with
# copies of the datasheets or with tables taken from them, and the others only with each other: `float32` is
# 2 * cores * fpus * clock. Figures of the chips: XLA's descriptions, where it has one. GeForce RTX cards run tensor
# cores at half rate if they accumulate in float32.
GPUS: Mapping[str, Gpu] = {
    "h200": Gpu("NVIDIA H200", (9, 0), 141, 4800, 67, 494.7, 989.4, 1978.9, 1978.9, 132, 1.98, 50,
                "NVIDIA H200 Tensor Core GPU datasheet", "NVIDIA H200 141GB HBM3e"),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 79, 3350, 67, 494.7, 989.4, 1978.9, 1978.9, 132, 1.98, 50, _H100),
    "h100-pcie": Gpu("NVIDIA H100 PCIe", (9, 0), 79, 2000, 51, 378, 756, 1513, 1513, 114, 1.755, 50, _H100),
    "h100-nvl": Gpu("NVIDIA H100 NVL", (9, 0), 93, 3900, 60, 417.5, 835.5, 1670.5, 1670.5, 132, 1.785, 50, _H100),
    "b200": Gpu("NVIDIA B200", (10, 0), 178, 7700, 75, 1100, 2250, 4500, 4500, 148, 1.965, 126,
                "NVIDIA HGX B200 datasheet"),
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 79, 2039, 19.5, 156, 312, None, 624, 108, 1.41, 40, _A100),
    "a100-40gb": Gpu("NVIDIA A100-SXM4-40GB", (8, 0), 39, 1555, 19.5, 156, 312, None, 624, 108, 1.41, 40, _A100),
    "a100-pcie": Gpu("NVIDIA A100 80GB PCIe", (8, 0), 79, 1935, 19.5, 156, 312, None, 624, 108, 1.41, 40, _A100),
    "a100-pcie-40gb": Gpu("NVIDIA A100-PCIE-40GB", (8, 0), 39, 1555, 19.5, 156, 312, None, 624, 108, 1.41, 40, _A100),
    "a30": Gpu("NVIDIA A30", (8, 0), 23, 933, 10.3, 82, 165, None, 330, 56, 1.44, 24,
               "NVIDIA A30 Tensor Core GPU datasheet"),
    "a40": Gpu("NVIDIA A40", (8, 6), 44, 696, 37.4, 74.8, 149.7, None, 299.3, 84, 1.74, 6, "NVIDIA A40 datasheet"),
    "a10": Gpu("NVIDIA A10", (8, 6), 22, 600, 31.2, 62.5, 125, None, 250, 72, 1.695, 6, "NVIDIA A10 datasheet"),
    "a6000": Gpu("NVIDIA RTX A6000", (8, 6), 47, 768, 38.7, 77.4, 154.8, None, 309.7, 84, 1.8, 6, _GA102),
    "3090": Gpu("NVIDIA GeForce RTX 3090", (8, 6), 23, 936, 35.6, 35.6, 71, None, 284, 82, 1.695, 6, _GA102),
    "4090": Gpu("NVIDIA GeForce RTX 4090", (8, 9), 23, 1008, 82.6, 82.6, 165.2, 330.3, 660.6, 128, 2.52, 72, _ADA),
    "5090": Gpu("NVIDIA GeForce RTX 5090", (12, 0), 31, 1792, 104.8, 104.8, 209.5, 419, 838, 170, 2.407, 96,
                "NVIDIA RTX Blackwell GPU Architecture whitepaper"),
    "l40s": Gpu("NVIDIA L40S", (8, 9), 44, 864, 91.6, 183, 362, 733, 733, 142, 2.52, 96, "NVIDIA L40S datasheet"),
    "l4": Gpu("NVIDIA L4", (8, 9), 22, 300, 30.3, 60, 121, 242.5, 242.5, 58, 2.04, 48,
              "NVIDIA L4 Tensor Core GPU datasheet"),
    "t4": Gpu("Tesla T4", (7, 5), 15, 320, 8.1, None, 65, None, 130, 40, 1.59, 4,
              "NVIDIA T4 Tensor Core GPU datasheet"),
    "v100": Gpu("Tesla V100-SXM2-16GB", (7, 0), 15, 900, 15.7, None, 125, None, None, 80, 1.53, 6, _V100),
    "v100-32gb": Gpu("Tesla V100-SXM2-32GB", (7, 0), 31, 900, 15.7, None, 125, None, None, 80, 1.53, 6, _V100),
    "v100-pcie": Gpu("Tesla V100-PCIE-16GB", (7, 0), 15, 900, 14, None, 112, None, None, 80, 1.38, 6, _V100),
    "v100-pcie-32gb": Gpu("Tesla V100-PCIE-32GB", (7, 0), 31, 900, 14, None, 112, None, None, 80, 1.38, 6, _V100),
}  # fmt: skip
"""The GPUs with known figures, by short name."""
