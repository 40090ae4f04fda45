"""Report the precision of each product in a program, without running it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np

from jaxmp.base import hardware, tables
from jaxmp.base.dtypes import closest_names, is_half
from jaxmp.base.inspection import tool
from jaxmp.inspect._audit.arguments import arguments_of, sent_over_batch_axes
from jaxmp.inspect._audit.compiled import CastsInLoops, dtypes_that_ran
from jaxmp.inspect._audit.evidence import Audited
from jaxmp.inspect._audit.findings import FINDERS, Finding, findings
from jaxmp.inspect._audit.products import Product, product_of, products_in_kernels, shares_of_flops, uncounted, work
from jaxmp.inspect._audit.weight_operands import weights_in
from jaxmp.inspect._memory.memory import Memory, of_call
from jaxmp.inspect.compiled import compiling, hlo
from jaxmp.inspect.program.calls import under_policy
from jaxmp.inspect.program.product_dtypes import widest
from jaxmp.policy.patterns import matches
from jaxmp.policy.policy_map import get_policy
from jaxmp.program.primitives import PRODUCTS
from jaxmp.program.reading import read_program

NOT_COUNTED = "not-counted"
"""The kind with which :meth:`Audit.check` accepts that something was not counted."""
_COLUMNS = ("path", "source", "phase", "dtypes", "ran", "FLOP", "bound by", "aligned", "products")


class AuditError(AssertionError):
    """The error of :meth:`Audit.check`, with one line for each problem."""


@dataclasses.dataclass(frozen=True)
class Audit(tables.Shown):
    """The result of :func:`audit`.

    In the printed table, products share a row if all other columns are equal and their paths differ only in numbers. A
    ``*`` stands for the numbers that differ.

    Attributes:
      products: the matrix products and convolutions, in program order.
      flops: for each compute dtype, its share of the products' FLOPs. A loop with an unknown number of iterations
        counts as one iteration; if this changes the shares, its products are in ``not_counted``.
      half_flops: the share of the products' FLOPs in compute dtypes of 16 bits or fewer; None if there are no
        products.
      memory: the result of :func:`jaxmp.inspect.memory`; None if nothing was compiled.
      findings: the precision problems.
      is_half_expected: whether products should be half: False if the policy that :func:`audit` got computes in float32.
      not_counted: what the audit could not count, such as products in a loop of unknown length.
    """

    products: tuple[Product, ...]
    flops: Mapping[str, float]
    half_flops: float | None
    memory: Memory | None
    findings: tuple[Finding, ...]
    is_half_expected: bool = True
    not_counted: tuple[str, ...] = ()

    def check(
        self,
        *,
        min_half_flops: float | None = None,
        allow: str | Collection[str | tuple[str, str]] = (),
        max_bytes: float | None = None,
    ) -> None:
        """Raise an error if the precision is wrong; call this method in your tests.

        Args:
          min_half_flops: the minimum of ``half_flops``, a share from 0 to 1. With 0, a program may have no products.
            None means 0.8, or 0 if the policy of the audit computes in float32.
          allow: the findings to accept: a kind of finding, or a list. Each item of the list is a kind, or a pair
            ``(kind, glob)``. A pair accepts findings of this kind in modules and scopes whose path matches the glob.
            The kind ``"not-counted"`` accepts that something was not counted.
          max_bytes: the maximum number of bytes at the memory peak.

        Raises:
          AuditError: the audit found a problem. The message has one line for each problem, with the remedy.
          ValueError: a kind is unknown, ``min_half_flops`` is not a share, or ``max_bytes`` is set and nothing was
            compiled.

        >>> half = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)
        >>> jaxmp.inspect.audit(jnp.matmul, compile=False)(half, half).check()
        """
        items = [allow] if isinstance(allow, str) else [*allow]
        not_allowed = self._findings_not_allowed([item for item in items if item != NOT_COUNTED])
        if min_half_flops is None:
            min_half_flops = 0.8 if self.is_half_expected else 0.0
        faults = [*_lines(not_allowed), *self.faults_of_flops(min_half_flops)]
        if max_bytes is not None:
            faults += self._faults_of_memory(max_bytes)
        if NOT_COUNTED not in items:
            faults += [
                f"{NOT_COUNTED}: {name}; to accept this, write allow={NOT_COUNTED!r}" for name in self.not_counted
            ]
        if not faults:
            return
        lines = [f"the audit found {len(faults)} fault{'s' * (len(faults) > 1)}:", *faults]
        if not_allowed:
            kinds = sorted({finding.kind for finding in not_allowed})
            lines.append(f"to accept findings of a kind, write check(allow={kinds!r})")
        raise AuditError("\n".join(lines))

    def _findings_not_allowed(self, allow: Collection[str | tuple[str, str]]) -> list[Finding]:
        allowed = []
        for kind_or_pair in allow:
            kind, pattern = (kind_or_pair, "**") if isinstance(kind_or_pair, str) else kind_or_pair
            if kind not in FINDERS:
                raise ValueError(
                    f"unknown kind of finding {kind!r}; kinds, nearest first: "
                    f"{closest_names(kind, [*FINDERS, NOT_COUNTED])}"
                )
            allowed.append((kind, pattern))
        not_allowed = []
        for finding in self.findings:
            if not any(_is_allowed(finding, kind, pattern) for kind, pattern in allowed):
                not_allowed.append(finding)
        return not_allowed

    def faults_of_flops(self, min_half_flops: float) -> list[str]:
        """Return the fault that less than ``min_half_flops`` of the FLOPs are half; empty without this fault."""
        if not 0 <= min_half_flops <= 1:
            raise ValueError(f"min_half_flops is a share from 0 to 1, got {min_half_flops}; write e.g. 0.99 for 99 %")
        if (self.half_flops or 0.0) >= min_half_flops:
            return []
        if self.half_flops is None:
            return ["half_flops: the program has no products, so none is in half; write min_half_flops=0 to allow this"]
        wide = [product for product in self.products if np.dtype(widest(product.operands)).itemsize > 2]
        largest: dict[str, str] = {}
        for product in sorted(wide, key=work, reverse=True):  # a layer has products in both passes
            name = f"{product.path or '(no scope)'} ({product.source or 'no line known'})"
            largest.setdefault(product.path or name, name)
        names = list(largest.values())[:3]
        return [
            f"half_flops: {self.half_flops:.1%} of the products' FLOPs are in 16 bits or fewer, not "
            f"{min_half_flops:.1%} ({self._shares()}); the largest products in wider dtypes: {', '.join(names)}; cast "
            "their operands to half, put the model under a policy, or lower min_half_flops"
        ]

    def _faults_of_memory(self, max_bytes: float) -> list[str]:
        if self.memory is None:
            raise ValueError("max_bytes needs a compiled program, got compile=False; audit with compile=True")
        if self.memory.peak <= max_bytes:
            return []
        return [
            f"memory: {tables.byte_text(self.memory.peak)} at the peak, more than {tables.byte_text(max_bytes)}; "
            "use a smaller batch, remat, or a half policy"
        ]

    def _shown(self) -> Any:
        title = f"{len(self.products)} product{'s' * (len(self.products) != 1)}, "
        title += f"{tables.short(sum(map(work, self.products)))}FLOP"
        if self.flops:
            title += f": {self._shares()}"
        notes = [""]
        if rounded := [product for product in self.products if _is_rounded_on_tpu(product)]:
            notes.append(
                f"{len(rounded)} of the products have float32 operands and ran in bfloat16, JAX's default on a TPU; "
                "for true float32 write the policy 'float32', jaxmp.precision('float32') or precision='highest'"
            )
        if self.memory is not None:
            notes.append(f"peak memory: {tables.byte_text(self.memory.peak)}")
            if self.memory.devices > 1:
                notes.append(self.memory.sent)
        if self.products and not self.half_flops:
            notes.append("no product is in half precision (float16 or bfloat16)")
        notes += tables.not_counted(self.not_counted)
        notes += _lines(self.findings) if self.findings else ["no findings"]
        return title, _COLUMNS, _rows(self.products), notes

    def _shares(self) -> str:
        return ", ".join(f"{dtype} {share:.1%}" for dtype, share in self.flops.items())


def _is_rounded_on_tpu(product: Product) -> bool:
    return product.ran == "bfloat16" and widest(product.operands) == "float32"


def _rows(products: Iterable[Product]) -> list[tuple[Any, ...]]:
    """Return the rows of the table.

    Products share a row if their other columns are equal and their paths differ only in numbers.
    """

    def key(product: Product) -> tuple[str, ...]:
        return tables.without_numbers(product.path), *_cells(product)

    rows = []
    for group in tables.grouped(products, key):
        path = tables.common_path([product.path for product in group])
        rows.append((path, *_cells(group[0]), len(group)))
    return rows


def _lines(findings: Iterable[Finding]) -> list[str]:
    """Return the lines of the findings.

    Findings share a line if they differ only in the numbers of their paths.
    """

    def key(finding: Finding) -> Finding:
        return dataclasses.replace(finding, path=tables.without_numbers(finding.path))

    lines = []
    for group in tables.grouped(findings, key):
        path = tables.common_path([finding.path for finding in group])
        line = str(dataclasses.replace(group[0], path=path))
        lines.append(line if len(group) == 1 else f"{line} ({len(group)} times)")
    return lines


def _cells(product: Product) -> tuple[str, ...]:
    dtypes = " × ".join(dict.fromkeys(product.operands))
    if product.result not in product.operands:
        dtypes += f" → {product.result}"
    flops = tables.short(product.flops)
    if product.count != 1:
        flops += f" × {product.count or '?'}"
    return (
        product.source,
        product.phase,
        dtypes,
        product.ran or "?",
        flops,
        product.bound or "?",
        "yes" if product.aligned else "no",
    )


def _is_allowed(finding: Finding, kind: str, pattern: str) -> bool:
    if finding.kind != kind:
        return False
    path = tuple(part for part in finding.path.split("/") if part)
    return any(matches(pattern, path[:stop], None) for stop in range(len(path) + 1))


@tool
def audit(
    fun: Callable[..., Any],
    policy: Any = None,
    *,
    overrides: Mapping[str, str] | None = None,
    expect: Any = None,
    device: str | None = None,
    topology: str | None = None,
    compile: bool = True,
) -> Callable[..., Audit]:
    """Return a function that audits a call of ``fun`` without running ``fun``.

    The returned function takes the arguments of ``fun``, or their shapes, and returns an :class:`Audit`.

    Args:
      fun: a train step, a loss or any other function that JAX can trace.
      policy: a policy with which :func:`jaxmp.autocast` runs ``fun``, in addition to the policies in ``fun``. Leave it
        out for a train step that was made with a policy.
      overrides: overrides of ``policy``, as for :func:`jaxmp.autocast`.
      expect: the policy or PolicyMap that the program should follow, by default ``policy``. Without either, only the
        policies of modules are checked, such as those of :func:`jaxmp.linen.apply_policy`.
      device: the device to compile for: None for the attached device, or the name of a GPU or TPU that is not
        attached, as for :func:`jaxmp.inspect.memory`.
      topology: the topology of a cluster of such GPUs, as for :func:`jaxmp.inspect.memory`.
      compile: whether to compile the program. If False, attributes and findings that need the compiled program are
        missing.

    Raises:
      ValueError: the policy, device or topology is unknown, or the arguments do not fit the topology.
      ModuleNotFoundError: the packages that compile for ``device`` are missing.

    >>> shapes = jax.ShapeDtypeStruct((16, 32), jnp.float32), jax.ShapeDtypeStruct((32, 8), jnp.float32)
    >>> half_product = jaxmp.autocast(jnp.matmul, "mixed_float16")
    >>> report = jaxmp.inspect.audit(half_product, expect="mixed_float16", compile=False)(*shapes)
    >>> report.flops, report.findings
    ({'float16': 1.0}, ())
    """
    fun = under_policy(fun, policy, overrides)
    expected = policy if expect is None else expect
    expected = None if expected is None else get_policy(expected)
    hardware_of_device = hardware.detect(device)

    def audit_call(*args: Any) -> Audit:
        function, inputs = compiling.call_of(fun, args)
        with warnings.catch_warnings():
            for reported_as_finding in ("the loss has float16 products", ".*but products are float64"):
                warnings.filterwarnings("ignore", message=reported_as_finding)
            trace = compiling.trace_of_call(function, inputs, device, compile, topology)
        program = memory = None
        if compile:
            compiled = compiling.compiled_of(trace, device)
            call = compiling.CompiledCall(function, inputs, trace, compiled, device, topology)
            program, memory = call.program, of_call(call)
        return _audit_of(trace, function, inputs, expected, hardware_of_device, program, memory)

    return audit_call


def _audit_of(
    trace: Any,
    jitted: Any,
    inputs: tuple[Any, ...],
    policy: Any,
    device: hardware.Hardware,
    compiled: hlo.HloProgram | None,
    memory: Memory | None,
) -> Audit:
    """Return the audit of a traced call.

    ``compiled`` is the compiled call. If the call was not compiled, ``compiled`` and ``memory`` are None.
    """
    program = read_program(getattr(trace, "traced", trace).jaxpr)  # nnx.jit wraps the trace of jax.jit
    arguments = arguments_of(jitted, inputs)
    weight = weights_in(program, arguments)
    ran = {} if compiled is None else dtypes_that_ran(compiled, program.values)
    products = []
    for value in program.values:
        if value.name in PRODUCTS:
            products.append((value, product_of(value, ran.get(value), device, weight(value))))
    audited = Audited(
        program=program,
        products=products,
        arguments=arguments,
        weight=weight,
        policy=policy,
        repeated=None if compiled is None else CastsInLoops(compiled),
        on_cpu=device.platform == "cpu",
        sent=() if memory is None else tuple(sent_over_batch_axes(memory.collectives.rows, arguments)),
    )
    all_products = (*(product for _, product in products), *products_in_kernels(program, device))
    flops = shares_of_flops(all_products)
    half = sum(share for dtype, share in flops.items() if np.dtype(dtype).itemsize <= 2)
    is_half_expected = policy is None or is_half(policy.compute_dtype)
    return Audit(
        all_products,
        flops,
        half if flops else None,
        memory,
        findings(audited),
        is_half_expected,
        (*uncounted(all_products), *(() if compiled is None else compiled.not_counted)),
    )
