"""The kinds of operations, the states of values, and the rules that raise states."""

from __future__ import annotations

import enum


class Kind(enum.Enum):
    """How the engine treats an operation before any rule raises its state."""

    SOURCE = "source"
    """An argument or a constant."""
    HALF = "half"
    """Computed in half, unless a rule raises it: a product, or an operation that a region or an override requests."""
    FULL = "float32"
    """Computed in float32."""
    STRICT = "beyond half"
    """Computed in float32; half precision cannot represent one of its constants, such as a mask's ``finfo.min``."""
    INFER = "infer"
    """Decided by its neighbours."""
    CLEAR = "moves"
    """Moves, picks or rounds data, in the dtype of its operand."""
    JOIN = "joins"
    """Joins several values: a loop's carry or a conditional's result."""
    KEPT = "kept"
    """Keeps its original dtypes."""


# These names are for speed: on Python 3.11, looking up `Kind.HALF` takes ten times as long.
SOURCE, HALF, FULL, STRICT, INFER, CLEAR, JOIN, KEPT = Kind


class State(enum.IntEnum):
    """The precision that the rules require of a value so far.

    A state only rises, so the dtypes do not depend on the order of the rules.
    """

    UNDECIDED = 0
    HALF = 1
    FLOAT32 = 2
    BEYOND_HALF = 3
    """Float32, because half precision cannot represent it."""


class Rule(enum.StrEnum):
    """The rules that raise the state of a value.

    ``reasons.py`` has the text that a plan shows for each rule that makes operations float32. For a rule of products,
    the value of the member is also the name of a pattern in plans.
    """

    AMPLIFIED = "amplifier"
    CANCELLATION = "cancellation"
    SEARCH = "search"
    CARRY = "carry"
    UPDATED = "updated"
    FEEDS = "feeds only float32"
    FOLLOWS = "follows float32"
    RANGE = "range"
    MASK = "mask"
