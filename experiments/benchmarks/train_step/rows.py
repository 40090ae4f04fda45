"""The rows to compare: a library, a precision, and their options."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterable
from typing import Literal

from experiments.training import cli

Precision = Literal["bf16", "fp16", "tf32", "fp32"]
Library = Literal[
    "jaxmp", "autocast", "unprepared", "hand", "jmp", "flax", "torch", "compile", "torchao", "transformer_engine"
]
PEERS = ("jmp", "torch")
"""The packages besides JAX whose versions are recorded."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A way to train.

    Attributes:
      label: the name of the row in tables.
      library: the library whose mixed precision is used.
      precision: the precision of products; fp32 is without tensor cores.
      scaled: whether the loss has a dynamic scale.
      constant_scale: whether the loss has a constant scale. Only a float16 row of jaxmp may have one.
      remat: the part of a transformer's blocks that is recomputed in the backward pass.
      chunks: the chunks of a transformer's cross-entropy, or ``"auto"``; 0 for the model's default. Only a row of jaxmp
        may have some.
      triton: whether XLA may compute products in Triton. If it may, bias and activation are kernels of their own, also
        where cuBLAS turns out to be faster and could have computed them with the product.
      mode: the mode of torch.compile.
    """

    label: str
    library: Library
    precision: Precision
    scaled: bool = False
    constant_scale: bool = False
    remat: str = "none"
    chunks: int | Literal["auto"] = 0
    triton: bool = True
    mode: str = "default"

    @property
    def torch(self) -> bool:
        """Return whether the row runs in torch."""
        return self.library in ("torch", "compile", "torchao", "transformer_engine")

    @property
    def compiler_options(self) -> dict[str, bool]:
        """Return the options of XLA."""
        return {} if self.triton else {"xla_gpu_enable_triton_gemm": False}

    @property
    def transformers_only(self) -> bool:
        """Return whether the row needs a transformer."""
        return self.remat != "none" or self.chunks != 0

    @property
    def missing(self) -> str | None:
        """Return a package that the row needs but that is not installed.

        The result is None if nothing is missing.
        """
        wanted = [*["torch"] * self.torch, *[self.library] * (self.library in ("jmp", "torchao", "transformer_engine"))]
        return next((package for package in wanted if importlib.util.find_spec(package) is None), None)


ROWS: dict[str, Row] = {
    "jaxmp-bf16": Row("jaxmp, bf16", "jaxmp", "bf16"),
    "jaxmp-bf16-1chunk": Row("jaxmp, bf16, loss in 1 chunk", "jaxmp", "bf16", chunks=1),
    "jaxmp-bf16-auto": Row('jaxmp, bf16, loss with chunks="auto"', "jaxmp", "bf16", chunks="auto"),
    "jaxmp-bf16-2chunks": Row("jaxmp, bf16, loss in 2 chunks", "jaxmp", "bf16", chunks=2),
    "jaxmp-bf16-4chunks": Row("jaxmp, bf16, loss in 4 chunks", "jaxmp", "bf16", chunks=4),
    "jaxmp-bf16-8chunks": Row("jaxmp, bf16, loss in 8 chunks", "jaxmp", "bf16", chunks=8),
    "jaxmp-fp16": Row("jaxmp, fp16, dynamic scaling", "jaxmp", "fp16", scaled=True),
    "jaxmp-bf16-cublas": Row("jaxmp, bf16, no product in Triton", "jaxmp", "bf16", triton=False),
    "jaxmp-bf16-2chunks-cublas": Row("jaxmp, bf16, no product in Triton, loss in 2 chunks", "jaxmp", "bf16",
                                     triton=False, chunks=2),
    "jaxmp-fp16-unscaled": Row("jaxmp, fp16, no scaling", "jaxmp", "fp16"),
    "jaxmp-fp16-constant": Row("jaxmp, fp16, constant scale, unchecked", "jaxmp", "fp16", constant_scale=True),
    "jaxmp-bf16-remat": Row("jaxmp, bf16, remat of all but attention", "jaxmp", "bf16", remat="attention", chunks=8),
    "jaxmp-bf16-remat-cublas": Row("jaxmp, bf16, no product in Triton, remat of all but attention", "jaxmp", "bf16",
                                   triton=False, remat="attention", chunks=8),
    "jaxmp-bf16-remat-dots": Row("jaxmp, bf16, remat of all but products", "jaxmp", "bf16", remat="dots"),
    "jaxmp-bf16-remat-full": Row("jaxmp, bf16, remat of all", "jaxmp", "bf16", remat="full"),
    "autocast-bf16": Row("jaxmp.autocast, bf16", "autocast", "bf16"),
    "autocast-fp16": Row("jaxmp.autocast, fp16, dynamic scaling", "autocast", "fp16", scaled=True),
    "unprepared-bf16": Row("jaxmp.autocast of float32 code by hand, bf16", "unprepared", "bf16"),
    "hand-bf16": Row("JAX by hand, bf16", "hand", "bf16"),
    "hand-bf16-cublas": Row("JAX by hand, bf16, no product in Triton", "hand", "bf16", triton=False),
    "hand-fp16": Row("JAX by hand, fp16, no scaling", "hand", "fp16"),
    "jmp-bf16": Row("jmp's policy on float32 code by hand, bf16", "jmp", "bf16"),
    "jmp-fp16": Row("by hand, fp16, jmp.DynamicLossScale", "jmp", "fp16", scaled=True),
    "flax-fp16": Row("by hand, fp16, flax DynamicScale", "flax", "fp16", scaled=True),
    "torch-bf16": Row("torch AMP, bf16", "torch", "bf16"),
    "torch-fp16": Row("torch AMP, fp16, GradScaler", "torch", "fp16", scaled=True),
    "compile-bf16": Row("torch.compile AMP, bf16", "compile", "bf16"),
    "compile-bf16-tuned": Row("torch.compile AMP, bf16, max-autotune", "compile", "bf16",
                              mode="max-autotune-no-cudagraphs"),
    "compile-fp16": Row("torch.compile AMP, fp16, GradScaler", "compile", "fp16", scaled=True),
    "jaxmp-tf32": Row("jaxmp, TF32", "jaxmp", "tf32"),
    "hand-tf32": Row("JAX by hand, TF32", "hand", "tf32"),
    "torch-tf32": Row("torch, TF32", "torch", "tf32"),
    "compile-tf32": Row("torch.compile, TF32", "compile", "tf32"),
    "jaxmp-fp32": Row("jaxmp, fp32", "jaxmp", "fp32"),
    "hand-fp32": Row("JAX by hand, fp32", "hand", "fp32"),
    "torch-fp32": Row("torch, fp32", "torch", "fp32"),
    "compile-fp32": Row("torch.compile, fp32", "compile", "fp32"),
}  # fmt: skip
"""Every row, by the name that ``--rows`` takes."""
CHUNKS = ("jaxmp-bf16-1chunk", "jaxmp-bf16-2chunks", "jaxmp-bf16-4chunks", "jaxmp-bf16-8chunks")
"""The rows that differ only in the chunks of the cross-entropy: fewer chunks take less time and more memory."""
SETTINGS = ("jaxmp-bf16", *CHUNKS, "jaxmp-bf16-cublas", "jaxmp-bf16-2chunks-cublas", "jaxmp-fp16")
"""The rows of jaxmp without remat. A user chooses XLA's options, and for a transformer the chunks."""
REMAT = ("jaxmp-bf16-remat", "jaxmp-bf16-remat-cublas")
"""The rows of jaxmp with the remat that saves the most memory for its time."""


def rows_of(
    model: str, names: tuple[str, ...] = (), among: Iterable[str] = tuple(ROWS), flag: str = "--rows"
) -> dict[str, Row]:
    """Return a model's rows in ``names``, in the order of ``ROWS``.

    If ``names`` is empty, all rows of the model are returned.

    Raises:
      ValueError: a name is not in ``among``, the names that ``flag`` takes.
    """
    chosen = cli.chosen(flag, names, {name: row for name, row in ROWS.items() if name in among})
    return {name: row for name, row in chosen.items() if model != "resnet50" or not row.transformers_only}
