"""The table of JAX's primitives: one row says all that jaxmp asks about a primitive.

The class of a primitive is its precision before neighbours are considered. Three questions determine it. Does the error
grow with the length of a sum or with the range of the argument? Is the primitive faster in half precision (float16 or
bfloat16)? Does its result mean the same in another dtype? An operation without a real floating result keeps its dtypes,
whatever its class.

The traits of a primitive say what it does with the elements of its operands. Every set of primitives in jaxmp is a
query of the table, such as ``with_trait(Trait.LOOKS_UP)`` or ``of_class(Class.HALF)``.
"""

from __future__ import annotations

import dataclasses
import enum
import fnmatch
import functools
from collections.abc import Iterator, Mapping


class Class(enum.StrEnum):
    """A class of operations, as written in an override: ``"class:accumulation"``."""

    HALF = "half"
    """Matrix products and convolutions: half operands, float32 accumulation, half result."""
    POINTWISE = "pointwise"
    """Float32, because it overflows in half, amplifies the rounding error of its argument, or rounds many times."""
    ACCUMULATION = "accumulation"
    """Float32, because errors grow with the number of terms. A sum of ones stops at 256 in bfloat16."""
    LINALG = "linalg"
    """Float32: factorisations, solvers and transforms. Few of their kernels exist in half precision."""
    WIDEST = "widest"
    """Reads several operands in the widest of their dtypes. Neighbours decide these dtypes."""
    INFER = "infer"
    """Half between two half values, otherwise float32. The operation is well conditioned and rounds once."""
    CLEAR = "clear"
    """Moves, selects or orders data, or rounds to integers, exactly in the dtype of its operand.

    The operands and the readers decide the dtype.
    """
    RECURSE = "recurse"
    """Has a body (an inner jaxpr), whose equations are decided one by one.

    A body that jaxmp cannot rebuild keeps its dtypes.
    """
    OPAQUE = "opaque"
    """Keeps its original dtypes, because its meaning or its code depends on them."""


class Trait(enum.Enum):
    """A property of a primitive."""

    # -- moves of data: each element of the result is an element of an operand -----------------------------------------
    IDENTITY = enum.auto()
    """Each result equals the operand at its position. The devices or the gradient may differ."""
    PERMUTES = enum.auto()
    """Each element of its only operand becomes one element of its only result, on the same device.

    The gradient is the inverse permutation. It sums no cotangents.
    """
    KEEPS_ORDER = enum.auto()
    """The result equals the operand if both have the same shape."""
    REPEATS = enum.auto()
    """Repeats elements of its operand at fixed positions, so its gradient is a sum."""
    SLICES = enum.auto()
    """Takes elements of its operand at fixed positions, each at most once."""
    LOOKS_UP = enum.auto()
    """Takes elements of its first operand at positions that other operands give."""
    EXTREME = enum.auto()
    """Takes the largest or smallest element along an axis."""
    POOLS = enum.auto()
    """Takes the largest or smallest element of each window."""
    SORTS = enum.auto()
    """Orders elements. The results of a primitive other than ``sort`` are elements and their indices."""
    COMBINES = enum.auto()
    """Takes each element of the result from one of several operands. So it rounds nothing."""
    CONCATENATES = enum.auto()
    """Concatenates arrays along an axis, which may be new."""
    BOUNDS = enum.auto()
    """Takes the larger or smaller of two elements at the same position."""
    SCATTERS = enum.auto()
    """Writes updates into an array at positions that an operand gives, or combines them with its elements."""

    # -- arithmetic ----------------------------------------------------------------------------------------------------
    ELEMENTWISE = enum.auto()
    """Computes each element of the result from the elements of the operands at the same position."""
    BROADCASTS = enum.auto()
    """Repeats an operand of fewer elements implicitly. The gradient of this operand is a sum."""
    SUMS = enum.auto()
    """Adds or subtracts two operands."""
    MULTIPLIES = enum.auto()
    """Multiplies or divides two operands element by element."""
    KEEPS_MAGNITUDE = enum.auto()
    """Changes at most the sign of its operand."""
    POWER = enum.auto()
    """Raises its first operand to a power."""
    SQUARE_ROOT = enum.auto()
    """Takes the square root of its operand, or the inverse of the square root."""
    LOGARITHM = enum.auto()
    """Takes the logarithm of its operand, or of 1 plus its operand."""
    EXPONENTIAL = enum.auto()
    """Raises a constant to the power of its operand."""
    GROWS = enum.auto()
    """Grows exponentially with an operand, or sums such values."""
    SATURATES = enum.auto()
    """Approaches 1 for large operands, so that a small change of the result is a large change of its distance to 1."""
    EQUATES = enum.auto()
    """Compares two operands for equality."""
    ORDERS = enum.auto()
    """Tells which of two operands is larger."""
    ROUNDS = enum.auto()
    """Rounds to an integer."""
    CASTS = enum.auto()
    """Rounds each element to another format, and computes nothing else."""
    REDUCES = enum.auto()
    """Combines all elements along some axes into one element."""
    SOLVES = enum.auto()
    """Turns a small change of a matrix into a much larger change of its factors, its inverse or its eigenvectors."""

    # -- whole equations -----------------------------------------------------------------------------------------------
    ONLY_FORWARD = enum.auto()
    """Has a body through which JAX does not differentiate backwards."""
    CUSTOM_DERIVATIVE = enum.auto()
    """Has a body whose derivative is a rule of the author."""
    INLINED = enum.auto()
    """Does nothing but run its body, so that the body can replace it."""
    PER_DEVICE = enum.auto()
    """May have different results on two devices even if its operands are the same on both."""
    UNCOUNTED = enum.auto()
    """Has a number of FLOPs that does not follow from its shapes: a kernel, the author's code, or a sparse array."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table: one primitive, or several equal ones.

    Attributes:
      names: the names of the primitives, separated by spaces. In ``Class.OPAQUE``, ``*`` matches any text.
      traits: the traits of the primitives.
      amplifies: the number of leading operands whose low digits become high digits of the result.
      singular: the position of the operand at whose zero the result or its derivative is infinite. A power has this
        singularity only if its exponent is less than 1, and ``atan2`` only if its other operand is 0, too.
      combines: for a sum, maximum, minimum, conjunction or disjunction, the primitive that combines two elements.
      body: for a primitive that only computes its body, the parameter that holds the body.
    """

    names: str
    traits: frozenset[Trait]
    amplifies: int = 0
    singular: int | None = None
    combines: str = ""
    body: str = ""


def _row(
    names: str,
    *traits: Trait,
    amplifies: int = 0,
    singular: int | None = None,
    combines: str = "",
    body: str = "",
) -> Row:
    return Row(names, frozenset(traits), amplifies, singular, combines, body)


# A comment gives the reason for the rows below it.
_TABLE: dict[Class, tuple[Row, ...]] = {
    Class.HALF: (_row("dot_general conv_general_dilated ragged_dot_general"),),
    Class.POINTWISE: (
        # the relative error of the result is |x| times that of the argument; float16 overflows beyond x = 11
        _row("exp exp2", Trait.EXPONENTIAL, Trait.GROWS, Trait.ELEMENTWISE),
        _row("expm1 cosh sinh", Trait.GROWS, Trait.ELEMENTWISE),
        _row("pow", Trait.POWER, Trait.GROWS, Trait.BROADCASTS, Trait.ELEMENTWISE, singular=0),
        # near 1 or -1 the result depends on a small difference, which half precision rounds away
        _row("log log2", Trait.LOGARITHM, Trait.ELEMENTWISE, singular=0),
        _row("log1p", Trait.LOGARITHM, Trait.ELEMENTWISE, amplifies=1),
        _row("acos acosh asin atanh erf_inv", Trait.ELEMENTWISE, amplifies=1),
        # the argument is often a variance or a sum of squares plus an epsilon, which vanishes in float16
        _row("rsqrt sqrt", Trait.SQUARE_ROOT, Trait.ELEMENTWISE, singular=0),
        _row("cbrt", Trait.ELEMENTWISE, singular=0),
        # if terms cancel, mostly rounding errors remain
        _row("sub", Trait.SUMS, Trait.BROADCASTS, Trait.ELEMENTWISE),
        # in bfloat16 an argument of 1000 is off by up to 2 radians, and phases of this size are common in float32
        _row("sin cos tan", Trait.ELEMENTWISE, amplifies=1),
        # the remainder of 300.4 by 1 is 0.4, but 300.4 is 300 in bfloat16
        _row("rem", Trait.BROADCASTS, Trait.ELEMENTWISE, amplifies=1),
        # well conditioned; float32 like the similar functions above, because the cost is small
        _row("asinh atan", Trait.ELEMENTWISE),
        # series and continued fractions of tens of terms
        _row("lgamma digamma bessel_i0e bessel_i1e", Trait.ELEMENTWISE),
        _row(
            "polygamma zeta igamma igammac igamma_grad_a regularized_incomplete_beta",
            Trait.BROADCASTS,
            Trait.ELEMENTWISE,
        ),
        _row("polynomial"),
        # operations that create or read complex numbers, whose parts are never half
        _row("complex", Trait.BROADCASTS, Trait.ELEMENTWISE),
        _row("conj real imag", Trait.ELEMENTWISE),
    ),
    Class.ACCUMULATION: (
        _row("reduce_sum", Trait.REDUCES, combines="add"),
        _row("reduce_prod", Trait.REDUCES),
        _row("cumsum reduce_window_sum", combines="add"),
        _row("cumlogsumexp", Trait.GROWS),
        _row("cumprod select_and_scatter_add"),
        # updates with equal indices are summed, as in the gradient of an embedding: 4096 ones sum to 256 in bfloat16
        _row("scatter-add scatter-sub", Trait.SCATTERS, combines="add"),
        _row("scatter-mul", Trait.SCATTERS),
        # the derivative counts equal updates: 4096 equal messages count as 256 in bfloat16
        _row("scatter-max", Trait.SCATTERS, Trait.COMBINES, combines="max"),
        _row("scatter-min", Trait.SCATTERS, Trait.COMBINES, combines="min"),
        # sums the cotangents of a value with many uses, in a chain of additions
        _row("add_any", Trait.SUMS, Trait.ELEMENTWISE, combines="add"),
        # sums over devices
        _row("psum psum_invariant unreduced_psum"),
        _row("reduce_scatter unreduced_reduce_scatter", Trait.PER_DEVICE),
        # jax.experimental.sparse: gather, multiply and scatter-add, without tensor cores
        _row("bcoo_dot_general bcoo_dot_general_sampled bcoo_spdot_general bcsr_dot_general", Trait.UNCOUNTED),
        _row("coo_matmat coo_matvec coo_spmm coo_spmv csr_matmat csr_matvec csr_spmm csr_spmv", Trait.UNCOUNTED),
        # these sum entries with equal indices too
        _row("bcoo_sum_duplicates bcoo_todense bcsr_todense coo_todense csr_todense todense", Trait.UNCOUNTED),
    ),
    Class.LINALG: (
        _row("cholesky cholesky_update eig eigh geqp3 geqrf hessenberg householder_product lu", Trait.SOLVES),
        _row("lu_pivots_to_permutation ormqr qr schur svd", Trait.SOLVES),
        _row("triangular_solve tridiagonal tridiagonal_solve spsolve", Trait.SOLVES),
        # its bodies apply and invert a matrix repeatedly until they converge
        _row("custom_linear_solve", Trait.SOLVES),
        # well conditioned
        _row("fft symmetric_product"),
    ),
    Class.WIDEST: (
        _row("add", Trait.SUMS, Trait.BROADCASTS, Trait.ELEMENTWISE, combines="add"),
        _row("mul", Trait.MULTIPLIES, Trait.BROADCASTS, Trait.ELEMENTWISE),
        _row("div", Trait.MULTIPLIES, Trait.BROADCASTS, Trait.ELEMENTWISE, singular=1),
        _row("atan2", Trait.BROADCASTS, Trait.ELEMENTWISE, singular=0),
        _row("max", Trait.BOUNDS, Trait.COMBINES, Trait.BROADCASTS, Trait.ELEMENTWISE, combines="max"),
        _row("min", Trait.BOUNDS, Trait.COMBINES, Trait.BROADCASTS, Trait.ELEMENTWISE, combines="min"),
        _row("clamp", Trait.BOUNDS, Trait.COMBINES, Trait.ELEMENTWISE),
        _row("select_n", Trait.COMBINES, Trait.ELEMENTWISE),
        _row("eq ne eq_to", Trait.EQUATES, Trait.ELEMENTWISE),
        _row("lt le gt ge lt_to le_to", Trait.ORDERS, Trait.ELEMENTWISE),
        _row("concatenate stack", Trait.CONCATENATES, Trait.COMBINES),
        _row("pad dynamic_update_slice", Trait.COMBINES),
        _row("scatter", Trait.SCATTERS, Trait.COMBINES),
        _row("ragged_all_to_all", Trait.COMBINES, Trait.PER_DEVICE),
        # the derivative of max pooling, which picks tangents without a sum
        _row("select_and_gather_add"),
    ),
    Class.INFER: (
        _row("neg abs", Trait.KEEPS_MAGNITUDE, Trait.ELEMENTWISE),
        _row("sign", Trait.ELEMENTWISE),
        _row("logistic tanh erf", Trait.SATURATES, Trait.ELEMENTWISE),
        # its tail decays like exp(-x²), which amplifies rounding errors; but a gelu adds this tail to larger values
        _row("erfc", Trait.ELEMENTWISE),
        # in a sum of squares, the squares are float32 too, because only the float32 sum reads them
        _row("square", Trait.POWER, Trait.ELEMENTWISE),
        _row("integer_pow", Trait.POWER, Trait.ELEMENTWISE, singular=0),
        # (1+x)(1-x) in the derivative of tanh; older versions of JAX use mul and sub
        _row("one_minus_square", Trait.ELEMENTWISE),
    ),
    Class.CLEAR: (
        _row("reshape squeeze", Trait.PERMUTES, Trait.KEEPS_ORDER),
        _row("transpose rev", Trait.PERMUTES),
        _row("copy name", Trait.IDENTITY, Trait.PERMUTES, Trait.ELEMENTWISE),
        _row("broadcast_in_dim tile", Trait.REPEATS, Trait.KEEPS_ORDER),
        _row("slice", Trait.SLICES, Trait.KEEPS_ORDER),
        _row("split unstack", Trait.SLICES),
        _row("dynamic_slice gather", Trait.LOOKS_UP),
        _row("reduce_max", Trait.EXTREME, Trait.REDUCES, combines="max"),
        _row("reduce_min", Trait.EXTREME, Trait.REDUCES, combines="min"),
        _row("cummax", Trait.EXTREME, combines="max"),
        _row("cummin", Trait.EXTREME, combines="min"),
        _row("reduce_window_max", Trait.POOLS, combines="max"),
        _row("reduce_window_min", Trait.POOLS, combines="min"),
        _row("sort top_k approx_top_k", Trait.SORTS),
        _row("argmax argmin"),
        _row("floor ceil round", Trait.ROUNDS, Trait.ELEMENTWISE),
        _row("is_finite", Trait.ELEMENTWISE),
        # identities
        _row("stop_gradient", Trait.IDENTITY, Trait.ELEMENTWISE),
        _row("optimization_barrier separate_cast xla_metadata_value", Trait.IDENTITY),
        _row("stage tie dce_sink zeros_like"),
        _row("device_put sharding_constraint reshard with_memory_space_constraint", Trait.IDENTITY),
        _row("shard_alike broadcast_to"),
        # casts that change the device axes of a type, not its dtype
        _row("preduced pvary reduced_vary_cast reduced_vary_cast_p", Trait.IDENTITY),
        _row("vary_unreduced_cast vary_unreduced_cast_p", Trait.IDENTITY),
        # moves between devices
        _row("all_to_all ppermute", Trait.PER_DEVICE),
        _row("all_gather all_gather_invariant all_gather_reduced pmax pmin unreduced_pmax unreduced_pmin"),
        _row("pbroadcast pbroadcast_dynamic global_array_to_host_local_array host_local_array_to_global_array"),
        # jax.experimental.sparse
        _row("bcoo_extract bcoo_fromdense bcoo_sort_indices bcoo_transpose", Trait.UNCOUNTED),
        _row("bcsr_extract bcsr_fromdense coo_fromdense csr_fromdense", Trait.UNCOUNTED),
    ),
    Class.RECURSE: (
        _row("jit remat2", body="jaxpr"),
        _row("shard_map", Trait.PER_DEVICE, body="jaxpr"),
        _row("closed_call call eval_jaxpr", Trait.INLINED, body="call_jaxpr"),
        _row("custom_jvp_call custom_vjp_call", Trait.CUSTOM_DERIVATIVE, body="call_jaxpr"),
        # The forward rule of a custom_vjp with `optimize_remat`. From JAX 0.12 on, the primitive also holds the part
        # of this rule that remains under checkpoint.
        _row("remat_opt", Trait.INLINED, Trait.CUSTOM_DERIVATIVE, body="fwd_jaxpr"),
        _row("scan while cond"),
        _row("custom_vmap_call composite", Trait.ONLY_FORWARD),
        _row("program_order xla_metadata_call compute_on fused_call"),
        _row("custom_jvp_call_jaxpr custom_lin linear_call"),
        # reductions by the user's function, usually a sum, so the operands keep their dtypes
        _row("reduce reduce_window select_and_scatter"),
    ),
    Class.OPAQUE: (
        # the dtype is part of their meaning: bits, neighbouring numbers, casts that the author wrote
        _row("convert_element_type reduce_precision", Trait.CASTS, Trait.ELEMENTWISE),
        _row("nextafter", Trait.ELEMENTWISE),
        _row("cast_repeated bitcast_convert_type to_edtype from_edtype"),
        # create values of the original dtype; for random numbers, another dtype gives other numbers
        _row("iota empty empty2 random_* rng_* iota_2x32_shape philox*x32 threefry*x32"),
        # code outside of JAX
        _row("pallas_call core_map mpmd_map custom_fusion fusible ffi_call tpu_custom_call", Trait.UNCOUNTED),
        _row("mosaic_gpu_p custom_partitioning call_exported", Trait.UNCOUNTED),
        _row("io_callback pure_callback buffer_callback", Trait.UNCOUNTED),
        _row("einshape_lo pack_dtype unpack_dtype"),
        # attention and products of cuDNN; their operands are half or fp8 already, and their statistics are float32
        _row("cudnn_fusion dot_product_attention_* scaled_dot scaled_matmul* rnn_fwd rnn_bwd", Trait.UNCOUNTED),
        # show or check the author's values
        _row("check debug_callback debug_print inspect_sharding unreachable assert_consumed_value consume"),
        # tiles are chosen for the width of a dtype
        _row("layout_constraint relayout"),
        # references: all readers and writers rely on the dtype
        _row("get swap addupdate accum_grad_in_ref new_ref empty_ref free_ref freeze run_state create_linear"),
        _row("pin unpin box_* new_box new_log log_extend log_read call_hi_primitive*"),
        # the start or the end of an operation; both must have the same dtype
        _row("*_start *_done psend precv"),
        # programs of an executor, on references
        _row("thunky.*"),
        # no floating operands
        _row("and", Trait.ELEMENTWISE, combines="and"),
        _row("or", Trait.ELEMENTWISE, combines="or"),
        _row("xor not clz population_count mulhi", Trait.ELEMENTWISE),
        _row("shift_left shift_right_arithmetic shift_right_logical", Trait.ELEMENTWISE),
        _row("reduce_and", Trait.REDUCES, combines="and"),
        _row("reduce_or", Trait.REDUCES, combines="or"),
        _row("reduce_xor", Trait.REDUCES),
        _row("axis_index", Trait.PER_DEVICE),
        _row("platform_index after_all create_token dim_as_value dimension_size shape_assertion"),
    ),
}


def _rows() -> Iterator[tuple[str, Class, Row]]:
    """Yield each primitive of the table with its class and its row."""
    for cls, rows in _TABLE.items():
        for row in rows:
            for name in row.names.split():
                yield name, cls, row


_ROWS = {name: (cls, row) for name, cls, row in _rows()}
_PATTERNS = [name for name in _ROWS if "*" in name]


# -- questions about one primitive -------------------------------------------------------------------------------------


def classify(name: str) -> Class | None:
    """Return the class of the primitive ``name``.

    The class is None if no supported version of JAX has the primitive.

    >>> classify("dot_general")
    <Class.HALF: 'half'>
    """
    entry = _find(name)
    return entry and entry[0]


def has_trait(name: str, trait: Trait) -> bool:
    """Return whether the primitive ``name`` has a trait.

    >>> has_trait("gather", Trait.LOOKS_UP)
    True
    """
    entry = _find(name)
    return entry is not None and trait in entry[1].traits


@functools.cache
def _find(name: str) -> tuple[Class, Row] | None:
    """Return the class and the row of a primitive, or None."""
    patterns = (pattern for pattern in _PATTERNS if fnmatch.fnmatchcase(name, pattern))
    return _ROWS.get(name) or next((_ROWS[pattern] for pattern in patterns), None)


# -- sets of primitives ------------------------------------------------------------------------------------------------


def of_class(*classes: Class) -> frozenset[str]:
    """Return the primitives of one of these classes, in all supported versions of JAX.

    >>> sorted(of_class(Class.HALF))
    ['conv_general_dilated', 'dot_general', 'ragged_dot_general']
    """
    return frozenset(name for name, cls, _ in _rows() if cls in classes)


def with_trait(*traits: Trait) -> frozenset[str]:
    """Return the primitives with at least one of these traits.

    >>> sorted(with_trait(Trait.CONCATENATES, Trait.LOOKS_UP))
    ['concatenate', 'dynamic_slice', 'gather', 'stack']
    """
    return frozenset(name for name, _, row in _rows() if not row.traits.isdisjoint(traits))


CAST = "convert_element_type"
PRODUCTS = of_class(Class.HALF)
"""Matrix products and convolutions."""
PICKS = with_trait(Trait.IDENTITY, Trait.PERMUTES, Trait.REPEATS, Trait.SLICES, Trait.LOOKS_UP)
"""Moves of one array. A cast before such an operation gives the same bits as a cast after it."""
MOVES = PICKS | with_trait(Trait.COMBINES, Trait.EXTREME, Trait.POOLS, Trait.SORTS)
"""Operations whose results contain only elements of their operands, so they round nothing."""
MONOTONE = with_trait(Trait.PERMUTES, Trait.POOLS) | {CAST}
"""Operations before which a value can be cast instead of after them.

Each element of the operand becomes one element of the result, or the operation takes an extreme element, and rounding
keeps the order. The set has no operation whose gradient is a sum, such as a lookup or a broadcast. A cast before such
an operation would compute the sum in half precision.
"""
COMBINES = with_trait(Trait.COMBINES)
"""Operations of several operands that do not round. In a loop, they accumulate no error."""
BROADCAST = with_trait(Trait.BROADCASTS)
"""Operations whose operands JAX broadcasts implicitly, along axes of size 1 and from scalars."""
MEETS = BROADCAST | COMBINES
"""Operations of several operands, some of which JAX may broadcast to the shape of the others."""
SUMS = with_trait(Trait.SUMS)
EXTREMES = with_trait(Trait.EXTREME)
BOUNDS = with_trait(Trait.BOUNDS)
CHOICES = COMBINES & with_trait(Trait.ELEMENTWISE)
"""Bounds and selections: each element of the result is an element of an operand at the same position."""
POWERS = with_trait(Trait.POWER)
COMPARISONS = with_trait(Trait.EQUATES, Trait.ORDERS)
SOLVERS = with_trait(Trait.SOLVES)

AMPLIFIERS = {name: row.amplifies for name, _, row in _rows() if row.amplifies}
"""For each amplifier, the number of leading operands whose low digits become high digits of the result."""
SINGULAR = {name: row.singular for name, _, row in _rows() if row.singular is not None}
"""For each operation with a singularity, the position of the operand that must not be 0."""
COMBINATIONS = {name: row.combines for name, _, row in _rows() if row.combines}
"""For each sum, maximum, minimum, conjunction and disjunction, the primitive that combines two elements."""
BODIES = {name: row.body for name, _, row in _rows() if row.body}
"""For each primitive that only computes its body, the parameter that holds the body."""

_FIELDS_OF_HI_PRIMITIVES = {
    frozenset(fields.split()): name
    for name, fields in {
        "remat2": "jaxpr policy prevent_cse",
        "custom_jvp_call": "traced jvp_rule symbolic_zeros",
        "custom_vjp_call": (
            "traced fwd bwd symbolic_zeros opt_remat with_logs remat_rules bwd_accums generic_batching"
        ),
        "remat_opt": "orig traced_fwd",
        "name": "name",
    }.items()
}


def replaced_by(fields: Mapping[str, object]) -> str | None:
    """Return the primitive that a hi primitive replaces.

    A hi primitive is the object in a ``call_hi_primitive`` equation of newer versions of JAX. The result is None if it
    replaces no primitive, or has a rule that this primitive does not have.

    Args:
      fields: the parameters of the hi primitive.

    >>> replaced_by({"orig": None, "traced_fwd": None})
    'remat_opt'
    """
    has_own_rule = fields.get("remat_rules") is not None  # from `jax.custom_vjp.defremat`
    return None if has_own_rule else _FIELDS_OF_HI_PRIMITIVES.get(frozenset(fields))
