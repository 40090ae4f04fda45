"""Peak memory: what the compiled step needs, and what the device reports."""

from __future__ import annotations

from typing import Any

import jax


def of_compiled(compiled: Any) -> int | None:
    """Bytes that a compiled function needs at most: arguments, results that reuse none of them, temporaries.

    None where the compiler does not tell.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    return (
        stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes + stats.temp_size_in_bytes
    )


def device_peak() -> int | None:
    """The most bytes this process has had on the first device so far; None where the device does not count (CPU)."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
