"""Published weights of GPT-2 and BERT in safetensors, to the params of :mod:`experiments.models` and back.

GPT-2's tensors are those of ``openai-community/gpt2``, with or without ``transformer.`` before their names; kernels are
stored (in, out). BERT's are those of ``bert-base-uncased`` with its head for masked words, the norms' params called
``weight`` and ``bias`` or, as they once were, ``gamma`` and ``beta``; kernels are stored (out, in), and queries, keys
and values apart. The rows that the models add to the vocabulary are zeros here and not in the files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from experiments.models.bert import BERT
from experiments.models.gpt2 import GPT2
from experiments.models.transformer import aligned

Tensors = dict[str, np.ndarray]
Source = str | Path | Mapping[str, Any]


class _Leaf(NamedTuple):
    """Where a param is published: side by side in several tensors, transposed, without the rows that fill up."""

    names: tuple[str, ...]
    transposed: bool = False
    padded: bool = False

    def read(self, tensors: Tensors, shape: tuple[int, ...]) -> np.ndarray:
        parts = [tensors[name].T if self.transposed else tensors[name] for name in self.names]
        array = np.concatenate(parts, axis=-1)
        return np.pad(array, [(0, shape[0] - len(array)), *[(0, 0)] * (array.ndim - 1)])

    def write(self, param: Any, vocabulary: int) -> Tensors:
        array = np.asarray(param)[:vocabulary] if self.padded else np.asarray(param)
        parts = np.split(array, len(self.names), axis=-1)
        return {
            name: np.ascontiguousarray(part.T if self.transposed else part)
            for name, part in zip(self.names, parts, strict=True)
        }


class _Layout(NamedTuple):
    """How a kind of model is published.

    Attributes:
      model: the model whose params these are, from the shapes of the tensors and the number of layers.
      leaf: from the path of a param to its tensors.
      canonical: from a name in a file to the name in ``leaf``.
      layer: what the name of a layer's tensor begins with, the number in a group.
      tied: tensors that only repeat another one.
      unused: names of tensors that the models have no use for, in full.
    """

    model: Callable[[Mapping[str, tuple[int, ...]], int], GPT2 | BERT]
    leaf: Callable[[str], _Leaf]
    canonical: Callable[[str], str]
    layer: str
    tied: dict[str, str]
    unused: str


def load_gpt2(source: Source) -> dict[str, Any]:
    """The params of :class:`experiments.models.GPT2` from published weights, float32 NumPy arrays.

    Args:
      source: a safetensors file, or its tensors by name.

    Raises:
      ValueError: it is no such file; tensors are missing, unknown or of another shape; the output layer is not the
        embeddings.

    >>> model = GPT2(vocabulary=50, sequence=8, layers=1, heads=2, width=16)
    >>> params = model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    >>> params = load_gpt2(gpt2_tensors(params, vocabulary=50))
    >>> params["h_0"]["attn"]["c_attn"]["kernel"].shape
    (16, 48)
    """
    return _load(source, _GPT2)


def load_bert(source: Source) -> dict[str, Any]:
    """The params of :class:`experiments.models.BERT` from published weights, float32 NumPy arrays.

    Tensors of the pooler and of the head for the next sentence are left out.

    Args:
      source: a safetensors file, or its tensors by name.

    Raises:
      ValueError: it is no such file; tensors are missing, unknown or of another shape; the output layer is not the
        embeddings.
    """
    return _load(source, _BERT)


def save_gpt2(params: Any, path: str | Path, *, vocabulary: int = 50257) -> None:
    """Writes params of :class:`experiments.models.GPT2` under the published names.

    Args:
      params: its ``params``.
      path: the safetensors file.
      vocabulary: the model's; further rows of the embeddings are not written.

    Raises:
      ValueError: the embeddings have another number of rows than that vocabulary needs.
    """
    _save(gpt2_tensors(params, vocabulary=vocabulary), path)


def save_bert(params: Any, path: str | Path, *, vocabulary: int = 30522) -> None:
    """Writes params of :class:`experiments.models.BERT` under the published names.

    Args:
      params: its ``params``.
      path: the safetensors file.
      vocabulary: the model's; further rows of the embeddings and of the output layer's bias are not written.

    Raises:
      ValueError: the embeddings have another number of rows than that vocabulary needs.
    """
    _save(bert_tensors(params, vocabulary=vocabulary), path)


def gpt2_tensors(params: Any, *, vocabulary: int = 50257) -> Tensors:
    """What :func:`save_gpt2` writes; also of gradients, or of anything else with a leaf for each param."""
    return _tensors(params, _GPT2, vocabulary)


def bert_tensors(params: Any, *, vocabulary: int = 30522) -> Tensors:
    """What :func:`save_bert` writes, see :func:`gpt2_tensors`."""
    return _tensors(params, _BERT, vocabulary)


def _load(source: Source, layout: _Layout) -> dict[str, Any]:
    tensors_by_name = source if isinstance(source, Mapping) else _read(Path(source))
    given = {layout.canonical(name): np.asarray(tensor) for name, tensor in tensors_by_name.items()}
    for name, other in layout.tied.items():
        if name in given and other in given and not np.array_equal(given[name], given[other], equal_nan=True):
            raise ValueError(f"{name} must be the same as {other}, for the model has one tensor for both")
    tensors = {
        name: np.asarray(tensor, np.float32)
        for name, tensor in given.items()
        if name not in layout.tied and not re.fullmatch(layout.unused, name)
    }
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    numbers = [int(found[1]) for name in tensors if (found := re.match(layout.layer, name))]
    try:
        model = layout.model(shapes, 1 + max(numbers, default=0))
    except KeyError as error:
        raise ValueError(f"the weights must have {error.args[0]}, which says the sizes; got {_some(tensors)}") from None
    except IndexError:
        raise ValueError(f"embeddings have 2 axes, got {[s for s in shapes.items() if len(s[1]) < 2]}") from None
    zeros = jnp.zeros((1, 1), jnp.int32)
    expected = traverse_util.flatten_dict(jax.eval_shape(model.init, jax.random.key(0), zeros)["params"], sep="/")
    wanted = {  # each tensor's name, with the shape it must have
        name: tensor.shape
        for path, param in expected.items()
        for name, tensor in layout.leaf(path)
        .write(np.broadcast_to(np.float32(0), param.shape), model.vocabulary)
        .items()
    }
    if missing := wanted.keys() - tensors.keys():
        raise ValueError(f"the weights of a {type(model).__name__} must have {_some(missing)} too, which are missing")
    if unknown := tensors.keys() - wanted.keys():
        raise ValueError(f"{type(model).__name__} has no place for {_some(unknown)}; leave them out if that is right")
    for name, shape in wanted.items():
        if shapes[name] != shape:
            raise ValueError(f"{name} must have shape {shape} beside the other weights, got {shapes[name]}")
    params = {path: layout.leaf(path).read(tensors, param.shape) for path, param in expected.items()}
    return traverse_util.unflatten_dict(params, sep="/")


def _read(path: Path) -> Tensors:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    if not path.is_file():
        raise ValueError(f"the weights are one safetensors file, or its tensors by name, but {path} is no file")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(
            f"{path} is no whole safetensors file ({error}); an index, or weights pickled by torch, are none"
        ) from error


def _tensors(params: Any, layout: _Layout, vocabulary: int) -> Tensors:
    tensors: Tensors = {}
    for path, param in traverse_util.flatten_dict(params, sep="/").items():
        leaf = layout.leaf(path)
        if leaf.padded and aligned(vocabulary) != len(param):
            raise ValueError(
                f"a vocabulary of {vocabulary} has {aligned(vocabulary)} rows in {path}, got {len(param)}; give the "
                "model's vocabulary=…"
            )
        tensors |= leaf.write(param, vocabulary)
    return tensors


def _save(tensors: Tensors, path: str | Path) -> None:
    from safetensors.numpy import save_file

    save_file(tensors, path, metadata={"format": "pt"})  # the layout, without which transformers reads no file


def _some(names: Any) -> str:
    first = sorted(names)[:5]
    return ", ".join(first) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


_LEAVES = {"kernel": "weight", "embedding": "weight", "scale": "weight", "bias": "bias"}


def _gpt2_leaf(path: str) -> _Leaf:
    module, _, leaf = path.rpartition("/")
    name = re.sub(r"^h_(\d+)", r"h.\1", module).replace("/", ".")
    return _Leaf((f"{name}.{_LEAVES[leaf]}",), padded=module == "wte")


_GPT2 = _Layout(
    model=lambda shapes, layers: GPT2(
        shapes["wte.weight"][0], shapes["wpe.weight"][0], layers, 1, shapes["wte.weight"][1]
    ),
    leaf=_gpt2_leaf,
    canonical=lambda name: name.removeprefix("transformer."),
    layer=r"h\.(\d+)\.",
    tied={"lm_head.weight": "wte.weight"},
    unused=r"h\.\d+\.attn\.(masked_)?bias",  # which tokens may be seen
)
_BERT_MODULES = {
    "word_embeddings": "bert.embeddings.word_embeddings",
    "position_embeddings": "bert.embeddings.position_embeddings",
    "token_type_embeddings": "bert.embeddings.token_type_embeddings",
    "embeddings_norm": "bert.embeddings.LayerNorm",
    "attention_output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
    "output_norm": "output.LayerNorm",
    "transform": "cls.predictions.transform.dense",
    "transform_norm": "cls.predictions.transform.LayerNorm",
}


def _bert_leaf(path: str) -> _Leaf:
    if path == "decoder_bias":
        return _Leaf(("cls.predictions.bias",), padded=True)
    *layer, module, leaf = path.split("/")
    prefix = f"bert.encoder.layer.{layer[0].removeprefix('layer_')}." if layer else ""
    parts = [f"attention.self.{part}" for part in ("query", "key", "value")]
    names = parts if module == "query_key_value" else [_BERT_MODULES[module]]
    full = tuple(f"{prefix}{name}.{_LEAVES[leaf]}" for name in names)
    return _Leaf(full, transposed=leaf == "kernel", padded=module == "word_embeddings")


def _bert_model(shapes: Mapping[str, tuple[int, ...]], layers: int) -> BERT:
    words, positions = (shapes[f"{_BERT_MODULES[name]}.weight"] for name in ("word_embeddings", "position_embeddings"))
    return BERT(words[0], positions[0], layers, 1, words[1])


_BERT = _Layout(
    model=_bert_model,
    leaf=_bert_leaf,
    canonical=lambda name: name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
        "LayerNorm.beta", "LayerNorm.bias"
    ),
    layer=r"bert\.encoder\.layer\.(\d+)\.",
    tied={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    unused=r"bert\.pooler\..*|cls\.seq_relationship\..*|bert\.embeddings\.position_ids",
)
