"""Models in Flax Linen, without a dtype in their code.

jaxmp sets their precision. :mod:`experiments.models.nnx` has some of the models in NNX.
"""

from __future__ import annotations

from experiments.models.bert import BERT as BERT
from experiments.models.cnn import CNN as CNN
from experiments.models.functional import Functions as Functions
from experiments.models.functional import linen_functions as linen_functions
from experiments.models.functional import nnx_functions as nnx_functions
from experiments.models.gpt2 import GPT2 as GPT2
from experiments.models.mlp import MLP as MLP
from experiments.models.next_token import NextToken as NextToken
from experiments.models.resnet import ResNet as ResNet
from experiments.models.resnet import resnet18 as resnet18
from experiments.models.resnet import resnet50 as resnet50
