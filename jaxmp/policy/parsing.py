"""Read the text of one policy.

An example is ``"params=float32,compute=bfloat16,output=float32,float8(min_dim=1024)"``.
"""

from __future__ import annotations

import re
from typing import Any

from jaxmp.base.dtypes import closest_names
from jaxmp.policy.policies import Policy


def parse_fields(text: str) -> Policy:
    """Return the policy that a text of ``KEY=DTYPE`` parts describes.

    Raises:
      ValueError: a part cannot be read; a key is unknown; or a key appears twice.
    """
    fields: dict[str, Any] = {}
    for part in filter(None, re.split(r",(?![^(]*\))", text)):  # commas outside of parentheses
        if part.lower() == "written":
            fields["written"] = True
            continue
        is_recipe = part.lower().startswith("float8")
        key, _, value = ("float8", "", part) if is_recipe else part.partition("=")
        if not value:
            raise ValueError(
                f"a part of a policy is KEY=DTYPE or float8(…), got {part!r} in {text!r}; write e.g. compute=float16"
            )
        field = "float8" if is_recipe else _KEYS.get(key.lower())
        if field is None:
            known = ("params", "compute", "output", "matmul_precision", "p", "c", "o", "m")
            raise ValueError(
                f"unknown key {key!r} in policy {text!r}; known keys, nearest first: {closest_names(key, known)}"
            )
        if field in fields:
            raise ValueError(f"a policy names each dtype once, got {key!r} twice in {text!r}; remove one of them")
        fields[field] = value
    params = fields.pop("param_dtype", "float32")
    compute = fields.pop("compute_dtype", params)
    return Policy(params, compute, fields.pop("output_dtype", compute), **fields)


ALIASES = {  # the names in Lightning and accelerate, and common variants
    **dict.fromkeys(("mixed_fp16", "mixed_f16", "fp16-mixed", "16-mixed"), "mixed_float16"),
    **dict.fromkeys(("mixed_bf16", "bf16-mixed"), "mixed_bfloat16"),
    **dict.fromkeys(("mixed_fp8", "mixed_f8"), "mixed_float8"),
    "tf32": "tensorfloat32",
    **{"16-true": "float16", "bf16-true": "bfloat16", "32-true": "float32", "64-true": "float64"},
}
# These names mean a mixed policy in accelerate and Lightning, and a policy with half-precision params in jmp.
AMBIGUOUS = frozenset(("half", "fp16", "f16", "bf16"))
_KEYS = {
    **dict.fromkeys(("p", "params", "param", "param_dtype"), "param_dtype"),
    **dict.fromkeys(("c", "compute", "compute_dtype"), "compute_dtype"),
    **dict.fromkeys(("o", "output", "output_dtype"), "output_dtype"),
    **dict.fromkeys(("m", "matmul_precision"), "matmul_precision"),
}
