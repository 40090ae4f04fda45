"""The compiled programs that are alive in this process, and the options to compile a program with."""

from __future__ import annotations

from typing import Any

import jax

_ID = 5
"""The number of the field ``id`` in XLA's ``HloModuleProto``."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
"""The wire types of protocol buffers."""


def compiler_options_of(lowered: Any) -> dict[str, Any] | None:
    """Return the compiler options of a lowered program; None if this version of JAX hides them."""
    options = getattr(getattr(lowered, "_lowering", None), "_compiler_options_kvs", None)
    return None if options is None else dict(options)


def live_modules(names: set[str]) -> list[tuple[str, int, str]]:
    """Return the name, the id and the HLO text of each compiled module with a name in ``names``.

    A trace of JAX's profiler names the program of a kernel by these two: ``hlo_module`` and ``program_id``.
    """
    client: Any = jax.local_devices()[0].client
    modules = []
    for executable in client.live_executables():
        for module in executable.hlo_modules():
            if module.name in names:
                modules.append((module.name, _id_of(module.as_serialized_hlo_module_proto()), module.to_string()))
    return modules


def _id_of(proto: bytes) -> int:
    """Return the id in a serialized ``HloModuleProto``; 0 if it has none."""
    position = 0
    while position < len(proto):
        key, position = _varint(proto, position)
        field, wire_type = key >> 3, key & 7
        if wire_type == _VARINT:
            number, position = _varint(proto, position)
            if field == _ID:
                return number
        elif wire_type == _BYTES:
            length, position = _varint(proto, position)
            position += length
        else:
            position += {_FIXED64: 8, _FIXED32: 4}[wire_type]
    return 0


def _varint(proto: bytes, position: int) -> tuple[int, int]:
    """Return the number at a position, and the position after it."""
    number = shift = 0
    while True:
        byte = proto[position]
        number |= (byte & 0x7F) << shift
        position += 1
        shift += 7
        if byte < 0x80:
            return number, position
