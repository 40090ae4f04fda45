"""Convert published weights of GPT-2 and BERT to params, and back.

The files are safetensors. The params are those of :mod:`experiments.models`. GPT-2's tensors are those of
``openai-community/gpt2``, with or without the prefix ``transformer.``. GPT-2's kernels are stored as (in, out). BERT's
tensors are those of ``bert-base-uncased`` with its head for masked tokens. The params of BERT's norms may have the
names ``weight`` and ``bias`` or the older names ``gamma`` and ``beta``. BERT's kernels are stored as (out, in), and
queries, keys and values are separate tensors. The rows with which the models pad the vocabulary are zeros in the params
and are not in the files.
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
    """The published tensors of a param.

    Attributes:
      names: the names of the tensors. Several tensors are concatenated along the last axis.
      transposed: whether the tensors are transposed.
      padded: whether the param has rows of padding that are not in the tensor.
    """

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


class Published(NamedTuple):
    """The published form of a model's weights.

    Attributes:
      model: makes the model from the shapes of the tensors and the number of layers.
      leaf: takes the path of a param, and returns its published tensors.
      canonical: takes a tensor's name in a file, and returns the name that ``leaf`` uses for the tensor.
      layer: a pattern that matches the start of the name of a layer's tensor. Its group is the number of the layer.
      tied: the names of tensors that must be equal to another tensor, each with the name of that other tensor.
      unused: a pattern that matches the full name of a tensor that the models do not use.
      positions: the module of the position embeddings.

    >>> model = GPT2(vocabulary=50, sequence=8, layers=1, heads=2, width=16)
    >>> params = model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    >>> params = PUBLISHED_GPT2.load(PUBLISHED_GPT2.tensors(params, vocabulary=50))
    >>> params["h_0"]["attn"]["c_attn"]["kernel"].shape
    (16, 48)
    """

    model: Callable[[Mapping[str, tuple[int, ...]], int], GPT2 | BERT]
    leaf: Callable[[str], _Leaf]
    canonical: Callable[[str], str]
    layer: str
    tied: dict[str, str]
    unused: str
    positions: str

    def load(self, source: Source) -> dict[str, Any]:
        """Return the params of the model from published weights, as float32 NumPy arrays.

        Tensors of BERT's pooler and of its head for next sentence prediction are ignored.

        Args:
          source: a safetensors file, or its tensors by name.

        Raises:
          ValueError: the file is not a safetensors file, tensors are missing, unknown or of another shape, or the
            output layer differs from the embeddings.
        """
        tensors_by_name = source if isinstance(source, Mapping) else _read(Path(source))
        tensors = {self.canonical(name): np.asarray(tensor) for name, tensor in tensors_by_name.items()}
        for name, other in self.tied.items():
            if (
                name in tensors
                and other in tensors
                and not np.array_equal(tensors[name], tensors[other], equal_nan=True)
            ):
                raise ValueError(f"{name} must be the same as {other}, because the model has one tensor for both")
        tensors = {
            name: np.asarray(tensor, np.float32)
            for name, tensor in tensors.items()
            if name not in self.tied and not re.fullmatch(self.unused, name)
        }
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        numbers = [int(match[1]) for name in tensors if (match := re.match(self.layer, name))]
        try:
            model = self.model(shapes, 1 + max(numbers, default=0))
        except KeyError as error:
            raise ValueError(
                f"the weights must have {error.args[0]}, which gives the sizes; got {_some(tensors)}"
            ) from None
        except IndexError:
            raise ValueError(f"embeddings have 2 axes, got {[s for s in shapes.items() if len(s[1]) < 2]}") from None
        zeros = jnp.zeros((1, 1), jnp.int32)
        expected = traverse_util.flatten_dict(jax.eval_shape(model.init, jax.random.key(0), zeros)["params"], sep="/")
        wanted = {  # the expected shape of each tensor, by name
            name: tensor.shape
            for path, param in expected.items()
            for name, tensor in self.leaf(path)
            .write(np.broadcast_to(np.float32(0), param.shape), model.vocabulary)
            .items()
        }
        if missing := wanted.keys() - tensors.keys():
            raise ValueError(
                f"the weights of a {type(model).__name__} must have {_some(missing)} too, which are missing"
            )
        if unknown := tensors.keys() - wanted.keys():
            raise ValueError(
                f"{type(model).__name__} has no place for {_some(unknown)}; leave them out if that is right"
            )
        for name, shape in wanted.items():
            if shapes[name] != shape:
                raise ValueError(f"{name} must have shape {shape} to fit the other weights, got {shapes[name]}")
        params = {path: self.leaf(path).read(tensors, param.shape) for path, param in expected.items()}
        return traverse_util.unflatten_dict(params, sep="/")

    def load_for(self, params: Any, path: Path) -> dict[str, Any]:
        """Return the params in a file for a model.

        The context of the model may be shorter than the file's.

        Args:
          params: the params of the model, or their shapes.
          path: a safetensors file.

        Raises:
          ValueError: for the reasons given in :meth:`load`, or because the model has another size.
        """
        loaded = self.load(path)
        wanted = traverse_util.flatten_dict(params, sep="/")
        rows = len(wanted[f"{self.positions}/embedding"])
        loaded[self.positions]["embedding"] = loaded[self.positions]["embedding"][:rows]
        shapes = {name: array.shape for name, array in traverse_util.flatten_dict(loaded, sep="/").items()}
        for name in sorted(wanted.keys() | shapes.keys()):
            expected = wanted[name].shape if name in wanted else "none"
            if shapes.get(name, "none") != expected:
                raise ValueError(
                    f"the model must have the size of --weights, got {name} of shape {expected} for "
                    f"{shapes.get(name, 'none')} in {path}; give its --layers, --heads and --width, at most its "
                    "--context, and its tokens (--tokens, --vocabulary)"
                )
        return loaded

    def tensors(self, params: Any, *, vocabulary: int) -> Tensors:
        """Return the published tensors by name.

        ``params`` may also be a tree like the params, such as gradients.

        Args:
          params: the params of the model.
          vocabulary: the vocabulary of the model. The padding of the embeddings and of the output layer's bias is left
            out.

        Raises:
          ValueError: the embeddings do not have the number of rows that ``vocabulary`` needs.
        """
        tensors: Tensors = {}
        for path, param in traverse_util.flatten_dict(params, sep="/").items():
            leaf = self.leaf(path)
            if leaf.padded and aligned(vocabulary) != len(param):
                raise ValueError(
                    f"a vocabulary of {vocabulary} has {aligned(vocabulary)} rows in {path}, got {len(param)}; give "
                    "the model's vocabulary=…"
                )
            tensors |= leaf.write(param, vocabulary)
        return tensors

    def save(self, params: Any, path: str | Path, *, vocabulary: int) -> None:
        """Write :meth:`tensors` in float32 to a safetensors file."""
        from safetensors.numpy import save_file

        whole = {name: array.astype(np.float32) for name, array in self.tensors(params, vocabulary=vocabulary).items()}
        save_file(whole, path, metadata={"format": "pt"})  # transformers does not read files without this entry


def _read(path: Path) -> Tensors:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    if not path.is_file():
        raise ValueError(f"the weights are one safetensors file, or its tensors by name, but {path} is not a file")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a complete safetensors file ({error}); an index or weights pickled by torch cannot be read"
        ) from error


def _some(names: Any) -> str:
    first = sorted(names)[:5]
    return ", ".join(first) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


_LEAVES = {"kernel": "weight", "embedding": "weight", "scale": "weight", "bias": "bias"}


def _gpt2_leaf(path: str) -> _Leaf:
    module, _, leaf = path.rpartition("/")
    name = re.sub(r"^h_(\d+)", r"h.\1", module).replace("/", ".")
    return _Leaf((f"{name}.{_LEAVES[leaf]}",), padded=module == "wte")


PUBLISHED_GPT2 = Published(
    model=lambda shapes, layers: GPT2(
        shapes["wte.weight"][0], shapes["wpe.weight"][0], layers, 1, shapes["wte.weight"][1]
    ),
    leaf=_gpt2_leaf,
    canonical=lambda name: name.removeprefix("transformer."),
    layer=r"h\.(\d+)\.",
    tied={"lm_head.weight": "wte.weight"},
    unused=r"h\.\d+\.attn\.(masked_)?bias",  # causal masks
    positions="wpe",
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


PUBLISHED_BERT = Published(
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
    positions="position_embeddings",
)
