"""The class of each primitive: its precision before neighbours are considered.

Three questions determine the class. Does the error grow with the length of a sum or with the range of the argument? Is
the primitive faster in half precision (float16 or bfloat16)? Does its result mean the same in another dtype? An
operation without a real floating result keeps its dtypes, whatever its class.
"""

from __future__ import annotations

import enum
import fnmatch
import re

from jaxmp.program.walk import PRODUCTS


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
    """Moves, selects or orders data without rounding. The operands and the readers decide the dtype."""
    RECURSE = "recurse"
    """Has a body (an inner jaxpr), whose equations are decided one by one.

    A body that jaxmp cannot rebuild keeps its dtypes.
    """
    OPAQUE = "opaque"
    """Keeps its original dtypes, because its meaning or its code depends on them."""


class Kind(enum.Enum):
    """The kind of an operation on its own, before its neighbours are considered."""

    SOURCE = "source"
    """An argument or a constant."""
    HALF = "half"
    """A matrix product or convolution, or an operation that a region or an override makes half."""
    FULL = "float32"
    """Computed in float32."""
    STRICT = "beyond half"
    """Computed in float32; half precision cannot represent one of its constants, such as a mask's ``finfo.min``."""
    INFER = "infer"
    """Decided by its neighbours."""
    CLEAR = "moves"
    """Moves data, in the dtype of its operand."""
    JOIN = "joins"
    """Joins several values: a loop's carry or a conditional's result."""
    KEPT = "kept"
    """Keeps its original dtypes."""


# These names are for speed: on Python 3.11, looking up `Kind.HALF` takes ten times as long.
SOURCE, HALF, FULL, STRICT, INFER, CLEAR, JOIN, KEPT = Kind


class State(enum.IntEnum):
    """The decision on a value.

    A state only rises, so the order of the rules does not matter.
    """

    UNDECIDED = 0
    HALF = 1
    FLOAT32 = 2
    BEYOND_HALF = 3
    """Float32, because half precision cannot represent it."""


class Rule(enum.StrEnum):
    """The rules that raise the state of a value.

    ``reasons.py`` has the text that a plan shows for each rule.
    """

    AMPLIFIED = "amplifier"
    CANCELLATION = "cancellation"
    SQUARES = "squares"
    SEARCH = "search"
    CARRY = "carry"
    FEEDS = "feeds only float32"
    FOLLOWS = "follows float32"
    RANGE = "range"


# Names of primitives, separated by spaces. A comment gives the reason for the lines below it. In the names of
# `Class.OPAQUE`, `*` matches any text.
_TABLE: dict[Class, tuple[str, ...]] = {
    Class.HALF: tuple(sorted(PRODUCTS)),
    Class.POINTWISE: (
        # the relative error of the result is |x| times that of the argument; float16 overflows beyond x = 11
        "exp exp2 expm1 cosh sinh pow tan",
        # near 1 or -1 the result depends on a small difference, which half precision rounds away
        "log log1p log2 acos acosh asin atanh erf_inv",
        # the argument is often a variance or a sum of squares plus an epsilon, which vanishes in float16
        "rsqrt sqrt cbrt",
        # if terms cancel, mostly rounding errors remain
        "sub",
        # in bfloat16 an argument of 1000 is off by up to 2 radians, and phases of this size are common in float32
        "sin cos",
        # well conditioned; float32 like the similar functions above, because the cost is small
        "asinh atan",
        # series and continued fractions of tens of terms
        "lgamma digamma polygamma zeta igamma igammac igamma_grad_a regularized_incomplete_beta",
        "bessel_i0e bessel_i1e polynomial",
        # operations that create or read complex numbers, whose parts are never half
        "complex conj real imag",
    ),
    Class.ACCUMULATION: (
        "reduce_sum reduce_prod cumsum cumprod cumlogsumexp reduce_window_sum select_and_scatter_add",
        # updates with equal indices are summed, as in the gradient of an embedding: 4096 ones sum to 256 in bfloat16
        "scatter-add scatter-sub scatter-mul",
        # the derivative counts equal updates: 4096 equal messages count as 256 in bfloat16
        "scatter-min scatter-max",
        # sums the cotangents of a value with many uses, in a chain of additions
        "add_any",
        # sums over devices
        "psum psum_invariant reduce_scatter unreduced_psum unreduced_reduce_scatter",
        # jax.experimental.sparse: gather, multiply and scatter-add, without tensor cores
        "bcoo_dot_general bcoo_dot_general_sampled bcoo_spdot_general bcsr_dot_general coo_matmat coo_matvec",
        "coo_spmm coo_spmv csr_matmat csr_matvec csr_spmm csr_spmv",
        # these sum entries with equal indices too
        "bcoo_sum_duplicates bcoo_todense bcsr_todense coo_todense csr_todense todense",
    ),
    Class.LINALG: (
        "cholesky cholesky_update eig eigh geqp3 geqrf hessenberg householder_product lu lu_pivots_to_permutation",
        "ormqr qr schur svd symmetric_product triangular_solve tridiagonal tridiagonal_solve spsolve fft",
        # its bodies apply and invert a matrix repeatedly until they converge
        "custom_linear_solve",
    ),
    Class.WIDEST: (
        "add mul div rem max min atan2 clamp select_n",
        "eq ne lt le gt ge eq_to le_to lt_to",
        "concatenate stack pad dynamic_update_slice scatter ragged_all_to_all",
        # the derivative of max pooling, which picks tangents without a sum
        "select_and_gather_add",
    ),
    Class.INFER: (
        "neg sign abs logistic tanh erf",
        # its tail decays like exp(-x²), which amplifies rounding errors; but a gelu adds this tail to larger values
        "erfc",
        # in a sum of squares, the squares are float32 too, because only the float32 sum reads them
        "square integer_pow",
        # (1+x)(1-x) in the derivative of tanh; older versions of JAX use mul and sub
        "one_minus_square",
    ),
    Class.CLEAR: (
        "reshape transpose broadcast_in_dim squeeze slice dynamic_slice gather rev tile split unstack copy",
        "reduce_max reduce_min cummax cummin reduce_window_max reduce_window_min sort top_k approx_top_k",
        "argmax argmin floor ceil round is_finite",
        # identities
        "name stage stop_gradient optimization_barrier tie dce_sink zeros_like xla_metadata_value",
        "device_put sharding_constraint reshard shard_alike with_memory_space_constraint broadcast_to",
        # moves between devices, and casts that change the device axes of a type, not its dtype
        "all_gather all_gather_invariant all_gather_reduced all_to_all ppermute pmax pmin unreduced_pmax",
        "unreduced_pmin pbroadcast pbroadcast_dynamic preduced pvary reduced_vary_cast reduced_vary_cast_p",
        "vary_unreduced_cast vary_unreduced_cast_p global_array_to_host_local_array host_local_array_to_global_array",
        # jax.experimental.sparse
        "bcoo_extract bcoo_fromdense bcoo_sort_indices bcoo_transpose bcsr_extract bcsr_fromdense coo_fromdense",
        "csr_fromdense",
    ),
    Class.RECURSE: (
        "jit closed_call call eval_jaxpr program_order composite xla_metadata_call compute_on fused_call",
        "scan while cond",
        "custom_jvp_call custom_jvp_call_jaxpr custom_vjp_call custom_lin custom_vmap_call linear_call",
        "remat2 remat_opt shard_map",
        # reductions by the user's function, usually a sum, so the operands keep their dtypes
        "reduce reduce_window select_and_scatter",
    ),
    Class.OPAQUE: (
        # the dtype is part of their meaning: bits, neighbouring numbers, casts that the author wrote
        "convert_element_type cast_repeated bitcast_convert_type reduce_precision nextafter to_edtype from_edtype",
        # create values of the original dtype; for random numbers, another dtype gives other numbers
        "iota empty empty2 random_* rng_* iota_2x32_shape philox*x32 threefry*x32",
        # code outside of JAX
        "pallas_call core_map mpmd_map custom_fusion fusible einshape_lo pack_dtype unpack_dtype ffi_call",
        "tpu_custom_call mosaic_gpu_p custom_partitioning call_exported io_callback pure_callback buffer_callback",
        # attention and products of cuDNN; their operands are half or fp8 already, and their statistics are float32
        "cudnn_fusion dot_product_attention_* scaled_dot scaled_matmul* rnn_fwd rnn_bwd",
        # show or check the author's values
        "check debug_callback debug_print inspect_sharding unreachable assert_consumed_value consume",
        # tiles are chosen for the width of a dtype
        "layout_constraint relayout",
        # references: all readers and writers rely on the dtype
        "get swap addupdate accum_grad_in_ref new_ref empty_ref free_ref freeze run_state create_linear pin unpin",
        "box_* new_box new_log log_extend log_read call_hi_primitive*",
        # the start or the end of an operation; both must have the same dtype
        "*_start *_done psend precv",
        # programs of an executor, on references
        "thunky.*",
        # no floating operands
        "and or xor not shift_* clz population_count mulhi reduce_and reduce_or reduce_xor axis_index platform_index",
        "after_all create_token dim_as_value dimension_size shape_assertion",
    ),
}

# For each primitive, the number of leading operands whose low digits become high digits of the result; None for all.
AMPLIFIERS: dict[str, int | None] = {
    # an argument of 300 with an error of 1 is a different phase
    **dict.fromkeys(("sin", "cos", "tan")),
    # 300.4 is 300 in bfloat16: another pixel, voxel or bin
    **dict.fromkeys(("floor", "ceil", "round")),
    "rem": 1,
    # near 1 or -1 the result depends on a small difference
    **dict.fromkeys(("acos", "acosh", "asin", "atanh", "erf_inv", "log1p")),
}
# A small change of a matrix changes its factors, its inverse or its eigenvectors much more.
SOLVERS = frozenset(" ".join(_TABLE[Class.LINALG]).split()) - {"fft", "symmetric_product"}

_NAMES = {cls: tuple(" ".join(lines).split()) for cls, lines in _TABLE.items()}
_CLASSES = {name: cls for cls, names in _NAMES.items() for name in names if "*" not in name}
_OPAQUE = re.compile("|".join(fnmatch.translate(name) for name in _NAMES[Class.OPAQUE] if "*" in name))


def classify(name: str) -> Class | None:
    """Return the class of the primitive ``name``.

    The class is None if no supported version of JAX has the primitive.

    >>> classify("dot_general")
    <Class.HALF: 'half'>
    """
    return _CLASSES.get(name) or (Class.OPAQUE if _OPAQUE.match(name) else None)


def primitives_of(cls: Class) -> frozenset[str]:
    """Return the primitives of a class in all supported versions of JAX.

    >>> sorted(primitives_of(Class.HALF))
    ['conv_general_dilated', 'dot_general', 'ragged_dot_general']
    """
    return frozenset(_NAMES[cls])
