"""Models in plain Flax Linen: none has a dtype in its code, :func:`jaxmp.linen.apply_policy` says what they compute in."""

from __future__ import annotations

from experiments.models.cnn import CNN as CNN
from experiments.models.next_token import NextToken as NextToken
