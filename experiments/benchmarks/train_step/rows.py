"""The rows to compare: a library, a precision, and their options."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterable
from typing import Literal

from experiments.training import cli

Precision = Literal["bf16", "fp16", "tf32", "fp32"]
Library = Literal["jaxmp", "autocast", "unprepared", "hand", "compile"]


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
    """

    label: str
    library: Library
    precision: Precision
    scaled: bool = False
    constant_scale: bool = False
    remat: str = "none"
    chunks: int | Literal["auto"] = 0
    triton: bool = True

    @property
    def torch(self) -> bool:
        """Return whether the row runs in torch."""
        return self.library == "compile"

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
        """Return "torch" if the row needs it and it is not installed, else None."""
        return "torch" if self.torch and importlib.util.find_spec("torch") is None else None


ROWS: dict[str, Row] = {
    "jaxmp-bf16": Row("jaxmp, bf16", "jaxmp", "bf16"),
    "jaxmp-bf16-1chunk": Row("jaxmp, bf16, loss in 1 chunk", "jaxmp", "bf16", chunks=1),
    "jaxmp-bf16-auto": Row('jaxmp, bf16, loss with chunks="auto"', "jaxmp", "bf16", chunks="auto"),
    "jaxmp-bf16-2chunks": Row("jaxmp, bf16, loss in 2 chunks", "jaxmp", "bf16", chunks=2),
    "jaxmp-fp16": Row("jaxmp, fp16, dynamic scaling", "jaxmp", "fp16", scaled=True),
    "jaxmp-bf16-cublas": Row("jaxmp, bf16, no product in Triton", "jaxmp", "bf16", triton=False),
    "jaxmp-bf16-2chunks-cublas": Row("jaxmp, bf16, no product in Triton, loss in 2 chunks", "jaxmp", "bf16",
                                     triton=False, chunks=2),
    "jaxmp-fp16-constant": Row("jaxmp, fp16, constant scale, unchecked", "jaxmp", "fp16", constant_scale=True),
    "jaxmp-bf16-remat": Row("jaxmp, bf16, remat of all but attention", "jaxmp", "bf16", remat="attention", chunks=8),
    "jaxmp-bf16-remat-cublas": Row("jaxmp, bf16, no product in Triton, remat of all but attention", "jaxmp", "bf16",
                                   triton=False, remat="attention", chunks=8),
    "jaxmp-bf16-remat-full": Row("jaxmp, bf16, remat of all", "jaxmp", "bf16", remat="full"),
    "autocast-bf16": Row("jaxmp.autocast, bf16", "autocast", "bf16"),
    "unprepared-bf16": Row("jaxmp.autocast of float32 code by hand, bf16", "unprepared", "bf16"),
    "hand-bf16": Row("JAX by hand, bf16", "hand", "bf16"),
    "hand-bf16-cublas": Row("JAX by hand, bf16, no product in Triton", "hand", "bf16", triton=False),
    "compile-bf16": Row("torch.compile AMP, bf16", "compile", "bf16"),
    "jaxmp-tf32": Row("jaxmp, TF32", "jaxmp", "tf32"),
    "hand-tf32": Row("JAX by hand, TF32", "hand", "tf32"),
    "jaxmp-fp32": Row("jaxmp, fp32", "jaxmp", "fp32"),
    "hand-fp32": Row("JAX by hand, fp32", "hand", "fp32"),
}  # fmt: skip
"""Every row, by the name that ``--rows`` takes."""
REFERENCE = "compile-bf16"
"""The row that the others are compared with."""


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
