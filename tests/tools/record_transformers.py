"""Record what GPT-2 and BERT of transformers compute in float64.

Run it by hand in an environment with torch and transformers: ``python tests/tools/record_transformers.py`` writes
transformers_models.npz beside this file. The tests only read that file.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers

VOCABULARY, LENGTH, WIDTH, HEADS = 41, 12, 16, 2  # with 41 words, our models pad the vocabulary to 64


def published(kind: str, layers: int = 2) -> torch.nn.Module:
    """Return a small model of transformers with random float64 weights.

    The model has no dropout.
    """
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=layers, n_head=HEADS,
            attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, attn_implementation="eager",
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.BertConfig(
            vocab_size=VOCABULARY, max_position_embeddings=LENGTH, hidden_size=WIDTH, num_hidden_layers=layers,
            num_attention_heads=HEADS, intermediate_size=4 * WIDTH, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, attn_implementation="eager",
        )  # fmt: skip
        model = transformers.BertForMaskedLM(config)
    generator = torch.Generator().manual_seed(0)
    for name, param in model.named_parameters():
        # The weights are large, so that attention is not uniform and every scale and bias matters. They are exact in
        # float16.
        drawn = torch.randn(param.shape, generator=generator) * 0.3
        is_scale = param.ndim == 1 and name.endswith("weight")
        param.data = (drawn + is_scale).half().double()
    return model.double().eval()


def record(kind: str, layers: int = 2) -> dict[str, np.ndarray]:
    """Return weights, inputs, last hidden state, logits, loss and gradients by name."""
    model = published(kind, layers)
    rng = np.random.default_rng(1)
    inputs = {"tokens": rng.integers(0, VOCABULARY, (3, LENGTH))}
    targets = rng.integers(0, VOCABULARY, (3, LENGTH))
    targets[:, ::3] = -100
    if kind == "bert":
        inputs["mask"] = np.arange(LENGTH) < np.array([[LENGTH], [LENGTH - 4], [5]])
        inputs["token_types"] = rng.integers(0, 2, (3, LENGTH))
    tensors = {name: torch.from_numpy(value.astype(np.int64)) for name, value in inputs.items()}
    renamed = {"tokens": "input_ids", "mask": "attention_mask", "token_types": "token_type_ids"}
    output = model(**{renamed[name]: tensor for name, tensor in tensors.items()}, output_hidden_states=True)
    loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), torch.from_numpy(targets).flatten())
    loss.backward()
    values = {f"inputs/{name}": value.astype(np.int32) for name, value in (inputs | {"targets": targets}).items()}
    values |= {"hidden": output.hidden_states[-1], "logits": output.logits, "loss": loss}
    values |= {f"weights/{name}": param.half() for name, param in model.named_parameters()}
    values |= {f"gradients/{name}": param.grad for name, param in model.named_parameters()}
    arrays = {name: value.detach().numpy() if torch.is_tensor(value) else value for name, value in values.items()}
    return {name: array.astype(np.float32) if array.dtype == np.float64 else array for name, array in arrays.items()}


if __name__ == "__main__":
    runs = {f"{kind}/{name}": array for kind in ("gpt2", "bert") for name, array in record(kind).items()}
    versions = np.array([torch.__version__, transformers.__version__])
    np.savez_compressed(Path(__file__).with_name("transformers_models.npz"), versions=versions, **runs)
