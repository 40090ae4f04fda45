"""Which precision ran where, from a program and what the compiler made of it; nothing is executed."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxmp._internals.jax.equations import asks_for_highest
from jaxmp._internals.jax.walk import PRODUCTS, equations, jaxprs_in
from jaxmp.base import hardware, tables
from jaxmp.base.dtypes import nearest
from jaxmp.base.trees import path_name
from jaxmp.engine.flops import flops_of
from jaxmp.inspect.compiled import hlo
from jaxmp.inspect.memory_plan import Memory, batch_axes, leaves_of, of_call, on_mesh
from jaxmp.inspect.program import targets
from jaxmp.inspect.program.calls import names_of_arguments
from jaxmp.inspect.program.evidence import Argument, Audited, Sent
from jaxmp.inspect.program.findings import FINDERS, Finding, findings
from jaxmp.inspect.program.products import multiplied, unaligned, weights_in, work
from jaxmp.inspect.program.values import Read, Value, same_turn, values_of
from jaxmp.inspect.traffic import Collective
from jaxmp.optim.loss_scale import LossScale, NoOpLossScale
from jaxmp.policy.patterns import matches
from jaxmp.policy.policy_map import get_policy
from jaxmp.sharding.specs import names_of as axes_of


class AuditError(AssertionError):
    """A program does not keep the precision that its author asked for; the text has a line for each fault."""


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product or convolution.

    Attributes:
      path: the modules and scopes that it is in, ``/`` between.
      source: the user's file and line.
      primitive: that of JAX.
      operands: the names of the two operands' dtypes, as written; of float8 values times their scales, float8.
      result: that of the result.
      ran: that of the operands in the compiled program; None if it can't be told.
      flops: of one time; a multiplication and an addition are two, padding and a dilation's zeros are none.
      count: how often it runs; None where only the run tells.
      bytes: of operands and result, once.
      bound: ``"arithmetic"`` or ``"bytes"``, whichever takes longer at the device's peaks; None where they are unknown.
      aligned: whether its dimensions, the batch apart, are multiples of 16 bytes: of 8 in 16 bits.
      phase: ``"forward"``, ``"backward"`` or ``"update"``.
    """

    path: str
    source: str
    primitive: str
    operands: tuple[str, str]
    result: str
    ran: str | None
    flops: int
    count: int | None
    bytes: int
    bound: str | None
    aligned: bool
    phase: str


@dataclasses.dataclass(frozen=True)
class Audit(tables.Shown):
    """What :func:`audit` found.

    Attributes:
      products: in program order.
      flops: the share of the products' FLOPs by the dtype that they are computed in; a loop whose turns only the run
        tells counts once.
      half_flops: the share in 16 bits or fewer; None of no products.
      memory: as :func:`jaxmp.inspect.memory` has it; None if nothing was compiled.
      findings: what is wrong.
    """

    products: tuple[Product, ...]
    flops: Mapping[str, float]
    half_flops: float | None
    memory: Memory | None
    findings: tuple[Finding, ...]

    def check(
        self,
        *,
        min_half_flops: float = 0.8,
        allow: str | Collection[str | tuple[str, str]] = (),
        max_bytes: float | None = None,
    ) -> None:
        """Raises unless the program keeps its precision; for users' own tests.

        Args:
          min_half_flops: the least share of the products' FLOPs in 16 bits or fewer; not asked of no products.
          allow: a kind of findings, or several kinds and pairs of a kind and a glob on the path, that are no faults.
          max_bytes: the most memory at the peak.

        Raises:
          AuditError: it does not; the text has a line for each fault, with its remedy.
          ValueError: a kind that there is not; ``max_bytes`` where nothing was compiled.

        >>> half = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)
        >>> jaxmp.inspect.audit(jnp.matmul, compile=False)(half, half).check()
        """
        allowed = [allow] if isinstance(allow, str) else allow
        pairs = [(each, "**") if isinstance(each, str) else each for each in allowed]
        for kind, _ in pairs:
            if kind not in FINDERS:
                raise ValueError(
                    f"there is no kind of finding {kind!r}; kinds, nearest first: {nearest(kind, FINDERS)}"
                )
        faults = [str(found) for found in self.findings if not any(_covers(*pair, found) for pair in pairs)]
        if self.half_flops is not None and self.half_flops < min_half_flops:
            faults.append(
                f"half_flops: {self.half_flops:.1%} of the products' FLOPs are in 16 bits or fewer, not "
                f"{min_half_flops:.1%} ({self._shares()}); {self._widest()}; cast the operands of these to half, put "
                "the model under a policy, or lower min_half_flops"
            )
        if max_bytes is not None:
            if self.memory is None:
                raise ValueError("max_bytes asks for the memory of the compiled program; audit with compile=True")
            if self.memory.peak > max_bytes:
                faults.append(
                    f"memory: {tables.short(self.memory.peak)}B at the peak, more than {tables.short(max_bytes)}B; "
                    "take a smaller batch, remat, or a half policy"
                )
        if faults:
            raise AuditError("\n".join([f"the audit found {len(faults)} fault{'s' * (len(faults) > 1)}:", *faults]))

    def _widest(self) -> str:
        wide = [each for each in self.products if np.dtype(_widest(each.operands)).itemsize > 2]
        most = sorted(wide, key=work, reverse=True)[:3]
        named = (f"{each.path or '(no scope)'} ({each.source or 'no line known'})" for each in most)
        return f"the largest others: {', '.join(named)}"

    def _shown(self) -> Any:
        total = sum(map(work, self.products))
        count = f"{len(self.products)} product{'s' * (len(self.products) != 1)}"
        title = f"{count}, {tables.short(total)}FLOP" + (": " * bool(self.flops)) + self._shares()
        rows = [
            (
                each.path,
                each.source,
                each.phase,
                " × ".join(dict.fromkeys(each.operands))
                + ("" if each.result in each.operands else f" → {each.result}"),
                each.ran or "?",
                tables.short(each.flops) + ("" if each.count == 1 else f" × {each.count or '?'}"),
                each.bound or "?",
                "yes" if each.aligned else "no",
            )
            for each in self.products
        ]
        memory = [f"peak memory: {tables.short(self.memory.peak)}B"] if self.memory is not None else []
        memory += [self.memory.sent] if self.memory is not None and self.memory.devices > 1 else []
        return title, _COLUMNS, rows, ["", *memory, *(map(str, self.findings) if self.findings else ["no findings"])]

    def _shares(self) -> str:
        return ", ".join(f"{dtype} {share:.1%}" for dtype, share in self.flops.items())


_COLUMNS = ("path", "source", "phase", "dtypes", "ran", "FLOP", "bound by", "aligned")


def _covers(kind: str, pattern: str, found: Finding) -> bool:
    path = tuple(part for part in found.path.split("/") if part)
    prefixes = [path[:stop] for stop in range(len(path) + 1)]
    return found.kind == kind and any(matches(pattern, prefix, None) for prefix in prefixes)


def audit(
    fun: Callable[..., Any],
    policy: Any = None,
    *,
    device: str | None = None,
    topology: str | None = None,
    compile: bool = True,
) -> Callable[..., Audit]:
    """A function of ``fun``'s arguments, or of their shapes, that returns its :class:`Audit`; nothing is executed.

    Args:
      fun: a train step, a loss or any function that JAX can trace.
      policy: what the author declares, a PolicyMap with its overrides too; it changes nothing. None declares nothing,
        but where :func:`jaxmp.linen.apply_policy` and its like put a module under one.
      device: what to compile for: None for the attached one, or the name of a GPU that is not there, such as
        ``"h200"`` (see :mod:`jaxmp.inspect.program.targets`).
      topology: of a cluster of such GPUs, as for :func:`jaxmp.inspect.memory`.
      compile: whether to compile; what needs the compiled program is None otherwise, and findings that do are left out.

    Raises (here, or from the call):
      ValueError: a policy, a device or a topology that there is not, or that arguments do not fit.
      ModuleNotFoundError: what compiles for an absent GPU is not installed.

    >>> shapes = jax.ShapeDtypeStruct((16, 32), jnp.float32), jax.ShapeDtypeStruct((32, 8), jnp.float32)
    >>> half_product = jaxmp.autocast(jnp.matmul, "mixed_float16")
    >>> report = jaxmp.inspect.audit(half_product, "mixed_float16", compile=False)(*shapes)
    >>> report.flops, report.findings
    ({'float16': 1.0}, ())
    """
    if policy is not None:
        policy = get_policy(policy)
    chip = hardware.detect(device)

    def audited(*args: Any) -> Audit:
        jitted, inputs = targets.call_of(fun, args)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="the loss has float16 products")  # a finding of its own
            trace = targets.traced(jitted, inputs, device, compile, topology)
        values = values_of(getattr(trace, "traced", trace).jaxpr)  # nnx.jit has a class of its own
        program = memory = None
        if compile:
            compiled = targets.compiled_of(trace, device)
            program = hlo.Program(str(compiled.as_text()))
            memory = of_call(jitted, inputs, compiled, program, device, topology)
        ran = {} if program is None else _ran(program, values.all)
        kinds = _kinds(jitted, inputs)
        weights = weights_in(values, kinds)
        products = [
            (value, _product(value, ran.get(value), chip, weights(value)))
            for value in values.all
            if value.name in PRODUCTS
        ]
        found = findings(
            Audited(
                values=values,
                products=products,
                arguments=_arguments(inputs),
                kinds=kinds,
                weights=weights,
                policy=policy,
                has_loss_scale=_has_loss_scale(inputs),
                repeated=None if program is None else _Repeated(program),
                on_cpu=chip.platform == "cpu",
                sent=() if memory is None else tuple(_sent(memory.collectives.rows, inputs, kinds)),
            )
        )
        listed = tuple(product for _, product in products) + _inside_kernels(values, chip)
        flops = _shares(listed)
        half = sum(share for dtype, share in flops.items() if np.dtype(dtype).itemsize <= 2)
        return Audit(listed, flops, half if flops else None, memory, found)

    return audited


def _sent(rows: Sequence[Collective], inputs: tuple[Any, ...], kinds: Sequence[str | None]) -> Iterator[Sent]:
    """What devices send over axes of the batch; a weight has the size of an argument, or of a layer of one."""
    leaves = [(leaf, kind, on_mesh(leaf)) for leaf, kind in zip(jax.tree.leaves(inputs), kinds, strict=True)]
    over, split = set(batch_axes(leaf for leaf, kind, _ in leaves if kind == "batch")), dict[int, set[str]]()
    known = {name for _, _, where in leaves if where for name in where.mesh.shape}
    for leaf, kind, where in leaves:
        if where and kind != "batch" and leaf.shape:
            names = set(axes_of(where.spec))
            size = leaf.size // math.prod(where.mesh.shape[name] for name in names - over)
            for each in (size, size // max(leaf.shape[0], 1)):
                split.setdefault(each, set()).update(names)
    for row in rows:
        axes, item = set(row.axis.split("+")), np.dtype(row.dtype).itemsize
        if not over or axes & over or not axes <= known:
            weights = {size: split[size // item] for size in row.arrays if size // item in split}
            of_weights = sum(size for size in row.arrays if size in weights)
            scattered = sum(size for size in row.arrays if axes & weights.get(size, set()))
            yield Sent(row, of_weights, row.bytes - of_weights, scattered)


def _has_loss_scale(args: Any) -> bool | None:
    """Whether a loss scale among some arguments scales; None of none."""
    scales = [each for each in jax.tree.leaves(args, is_leaf=_is_scale) if _is_scale(each)]
    return any(not isinstance(each, NoOpLossScale) for each in scales) if scales else None


def _is_scale(node: Any) -> bool:
    return isinstance(node, LossScale)


def _arguments(args: tuple[Any, ...]) -> list[Argument | None]:
    """What each array among some arguments is, in their order."""
    found: list[Argument | None] = []
    for path, node in jax.tree.leaves_with_path(args, is_leaf=lambda each: isinstance(each, (*_ROLES, nnx.Variable))):
        role = next((role for cls, role in _ROLES.items() if isinstance(node, cls)), None)
        for inner, _ in jax.tree.leaves_with_path(node):
            name = tuple(path_name((each,)) for each in (*path[1:], *(inner if role == "optimizer" else ())))
            found.append(Argument(role, name) if role else None if inner else _plain(path))
    return found


_ROLES = {
    **dict.fromkeys((nnx.Optimizer, nnx.OptState, nnx.OptVariable), "optimizer"),
    nnx.Param: "params",
    nnx.BatchStat: "statistics",
}
_STATE = {"params": "params", "opt_state": "optimizer", "batch_stats": "statistics", "model_state": "statistics"}
_COLLECTIONS = {"params": "params", "batch_stats": "statistics"}


def _plain(path: tuple[Any, ...]) -> Argument | None:
    """What an array is by the first part of its path that says so: a field of a train state, a collection of Flax."""
    for n, part in enumerate(path):
        role = _STATE.get(getattr(part, "name", "")) or _COLLECTIONS.get(str(getattr(part, "key", "")))
        if role:
            rest = [path_name((each,)) for each in path[n + 1 :]]
            if role == "statistics" and rest[:1] == ["cache"]:
                return None
            while rest[:1] and rest[0] in _COLLECTIONS and role != "optimizer":
                rest = rest[1:]
            return Argument(role, tuple(rest))
    return None


def _kinds(jitted: Any, inputs: tuple[Any, ...]) -> list[str | None]:
    """Of each array among some arguments its kind, as :func:`jaxmp.inspect.memory` has it; None where nothing tells.

    Types and names tell; else that params are a tree and come first, and that a lone array is no params.
    """
    leaves = list(leaves_of(inputs, names_of_arguments(jitted)))
    is_array = hasattr(inputs[0], "dtype") if inputs else False
    if any(leaf.is_told and leaf.kind != "other" for leaf in leaves) or (inputs[1:] and not is_array):
        has_params = any(leaf.is_told and leaf.kind not in ("batch", "other") for leaf in leaves)
        return [leaf.kind if leaf.is_told or not has_params else "batch" for leaf in leaves]
    return ["batch" if is_array and len(leaves) == 1 else None] * len(leaves)


def _product(value: Value, ran: str | None, chip: hardware.Hardware, weights: Sequence[int]) -> Product:
    place, (left, right) = value.at, value.inputs[:2]
    operands = multiplied(left), multiplied(right)
    flops = flops_of(place.eqn, counts_padding=False) or 0
    names = zip((left, right, value), (*operands, value.dtype.name), strict=True)
    size = sum(math.prod(each.shape) * np.dtype(name).itemsize for each, name in names)
    return Product(
        path=place.path,
        source=place.source,
        primitive=place.eqn.primitive.name,
        operands=operands,
        result=value.dtype.name,
        ran=ran,
        flops=flops,
        count=place.count,
        bytes=size,
        bound=_bound(flops, size, _widest(operands), place.eqn.params.get("precision"), chip),
        aligned=not unaligned(value, weights),
        phase=place.phase,
    )


def _inside_kernels(values: Any, chip: hardware.Hardware) -> tuple[Product, ...]:
    """The products in what has a program of its own inside (a kernel, a solver): how often they run is unknown."""
    found = []
    for place in values.places.values():
        for eqn in (each for inner in jaxprs_in(place.eqn) if place.bodies is None for each in equations(inner)):
            if eqn.primitive.name in PRODUCTS:
                inside = dataclasses.replace(place, eqn=eqn, turns=(*place.turns, None))
                reads: list[Read] = [(n, Value(atom.aval, "argument"), same_turn) for n, atom in enumerate(eqn.invars)]
                value = Value(eqn.outvars[0].aval, eqn.primitive.name, place=inside, reads=reads)
                found.append(_product(value, None, chip, [1]))
    return tuple(found)


def _bound(flops: int, size: int, dtype: str, precision: Any, chip: hardware.Hardware) -> str | None:
    is_tensorfloat = dtype == "float32" and "tensorfloat32" in chip.peak_tflops and not asks_for_highest(precision)
    rate = chip.peak_tflops.get("tensorfloat32" if is_tensorfloat else dtype)
    if rate is None or chip.peak_bandwidth is None:
        return None
    return "arithmetic" if flops / (rate * 1e12) >= size / chip.peak_bandwidth else "bytes"


def _widest(dtypes: Collection[str]) -> str:
    """The dtype that a product of these is computed in."""
    return max(dtypes, key=lambda name: np.dtype(name).itemsize)


def _shares(products: Sequence[Product]) -> dict[str, float]:
    flops = Counter[str]()
    for each in products:
        flops[_widest(each.operands)] += work(each)
    return {dtype: count / flops.total() for dtype, count in flops.most_common() if flops.total()}


_Origin = tuple[frozenset[str], bool]
"""The scopes that an operation comes from, and whether it is of the backward pass."""


def _origin(instruction: hlo.Instruction) -> _Origin | None:
    """None without metadata."""
    name = instruction.op_name
    return (_scopes(name), "transpose(" in name) if name else None


def _origin_of(value: Value) -> _Origin:
    return _scopes("/".join((*value.at.names, value.name))), value.at.phase == "backward"


def _scopes(op_name: str) -> frozenset[str]:
    return frozenset(hlo.path_of(op_name).split("/"))


def _ran(program: hlo.Program, values: Sequence[Value]) -> dict[Value, str]:
    """The dtypes that products have in a compiled program, told by their scopes and by the sizes of their results."""
    compiled: dict[Any, set[str]] = {}
    for computation, instruction, _ in program.walk():
        origin = _origin(instruction) if hlo.product_kind(instruction) else None
        dtypes = [hlo.dtype_name(dtype) for dtype in program.dtypes(computation, instruction)[:2]]
        if origin is None or not dtypes:
            continue
        size = math.prod(instruction.arrays[0].shape)
        for key in ((origin, size), (origin, None)):
            compiled.setdefault(key, set()).add(_widest(dtypes))
    found = {}
    for value in values:
        if value.name in PRODUCTS:
            origin = _origin_of(value)
            ran = compiled.get((origin, math.prod(value.shape))) or compiled.get((origin, None), set())
            if len(ran) == 1:
                (found[value],) = ran
    return found


class _Repeated:
    """Tells whether the compiled program makes a cast again in each turn of a loop."""

    def __init__(self, program: hlo.Program) -> None:
        inside, stack = set[str](), list[str]()
        for _, instruction, _ in program.walk():
            if instruction.opcode == "while":
                stack += program.bodies(instruction)
        while stack:
            name = stack.pop()
            if name not in inside:
                inside.add(name)
                stack += [each for one in program.computations.get(name, {}).values() for each in program.bodies(one)]
        self.casts = set[Any]()
        for name in inside:
            for instruction in program.computations.get(name, {}).values():
                # One that the backend added has another name.
                if instruction.opcode == "convert" and instruction.op_name.endswith("/convert_element_type"):
                    (array,) = instruction.arrays
                    self.casts.add((_origin(instruction), hlo.dtype_name(array.dtype), math.prod(array.shape)))

    def __call__(self, value: Value) -> bool:
        return (_origin_of(value), value.dtype.name, math.prod(value.shape)) in self.casts
