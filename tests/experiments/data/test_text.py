"""Text as tokens: documents, tokenizers, and BERT's masking."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import data
from experiments.data import corpus, text
from experiments.data.masking import IGNORE, mask

# --- documents ------------------------------------------------------------------------------------------------------


def test_every_tenth_file_of_a_folder_is_held_out_or_the_end_of_each_of_few_files(tmp_path):
    for i in range(21):
        (tmp_path / "books" / f"{i % 3}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "books" / f"{i % 3}" / f"{i:02}.txt").write_text(f"document {i}")
    (tmp_path / "books" / "0" / "00.bin").write_text("no text")
    (tmp_path / "books" / "0" / "empty.txt").write_text("")
    names = sorted((i % 3, i) for i in range(21))
    documents = corpus.read(str(tmp_path / "books"))
    assert documents.test == [f"document {i}".encode() for _, i in names[9::10]]
    assert len(documents.train) == 19 and not {*documents.test} & {*documents.train}
    assert corpus.digest(documents.train) != corpus.digest([b"".join(documents.train)])
    (tmp_path / "few").mkdir()
    for name in ("a.py", "b.md"):
        (tmp_path / "few" / name).write_text(name * 10)
    documents = corpus.read(str(tmp_path / "few"))
    assert documents.train == [b"a.py" * 9, b"b.md" * 9] and documents.test == [b"a.py", b"b.md"]


# --- tokenizers -----------------------------------------------------------------------------------------------------


def test_sequences_are_cut_from_the_text_and_go_on_where_they_stopped():
    token_ids = jnp.arange(50, dtype=jnp.uint16)
    batches = text.sequences(token_ids, 5, 8, seed=3)
    first, second = next(batches), next(batches)
    assert first.dtype == np.int32 and first.shape == (8, 5)
    np.testing.assert_array_equal(first, first[:, :1] + np.arange(5))
    np.testing.assert_array_equal(second, next(text.sequences(token_ids, 5, 8, seed=3, start=1)))
    assert not np.array_equal(first, second)
    spread = np.concatenate(list(text.spread_sequences(token_ids, 5, 2, 2)))
    np.testing.assert_array_equal(spread[:, 0], [0, 15, 30, 45])
    with pytest.raises(data.DataError, match="shorter than the text of 50 tokens, got --context 50"):
        next(text.sequences(token_ids, 51, 1, seed=0))


# --- masking --------------------------------------------------------------------------------------------------------


def test_fifteen_percent_are_predicted_of_which_eighty_ten_and_ten_are_masked_random_and_unchanged():
    size, end = 50, 49
    shown = jax.random.randint(jax.random.key(1), (200, 500), 0, size, jnp.int32)
    draw = jax.jit(lambda key: mask(key, shown, size, size, end))
    (tokens_, targets), shown = map(np.asarray, draw(jax.random.key(0))), np.asarray(shown)
    chosen = targets != IGNORE
    np.testing.assert_array_equal(targets[chosen], shown[chosen])
    np.testing.assert_array_equal(tokens_[~chosen], shown[~chosen])
    assert not (targets == end).any()
    assert chosen[shown != end].mean() == pytest.approx(0.15, abs=0.005)
    hidden, same = tokens_[chosen] == size, tokens_[chosen] == shown[chosen]
    assert hidden.mean() == pytest.approx(0.8, abs=0.01)
    assert same.mean() == pytest.approx(0.1 + 0.1 / size, abs=0.01)
    drawn = tokens_[chosen][~hidden & ~same]
    assert np.bincount(drawn, minlength=size).min() > 0 and drawn.max() < size
    np.testing.assert_array_equal(draw(jax.random.key(0)).tokens, tokens_)
    assert not np.array_equal(draw(jax.random.key(2)).targets, targets)
