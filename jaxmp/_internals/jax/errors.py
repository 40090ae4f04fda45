"""Errors of JAX without a public name."""

from __future__ import annotations

from jax._src.core import ShardingTypeError as ShardingTypeError
