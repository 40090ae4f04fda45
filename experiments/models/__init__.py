"""Models in plain Flax Linen, without a dtype in their code: :func:`jaxmp.linen.apply_policy` brings the precision."""

from __future__ import annotations

from experiments.models.cnn import CNN as CNN
from experiments.models.gpt2 import GPT2 as GPT2
from experiments.models.mlp import MLP as MLP
from experiments.models.next_token import NextToken as NextToken
