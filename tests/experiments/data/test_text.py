"""Text as tokens: documents, tokenizers, and BERT's masking."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from experiments import data
from experiments.data import corpus, text, tokens
from experiments.data.masking import IGNORE, mask
from experiments.training import mesh

PAIRS = [b"abababcdc", b"", b"x", b"ababefef"]  # an odd last byte belongs to no pair


@pytest.fixture(autouse=True)
def nothing_remembered():
    tokens.load.cache_clear()


# --- documents ------------------------------------------------------------------------------------------------------


def test_the_last_tenth_of_a_file_is_held_out_and_a_missing_file_is_an_error(tmp_path):
    (tmp_path / "a.log").write_bytes(bytes(range(100)))
    documents = corpus.read(str(tmp_path / "a.log"))
    assert documents.train == [bytes(range(90))] and documents.test == [bytes(range(90, 100))]
    assert documents.origin.startswith("a.log: 1 file, 100 bytes, sha256 ")

    with pytest.raises(data.DataError, match=r"--dataset is pysource, or the path of a text file .* there is no .*/a"):
        corpus.read(str(tmp_path / "a"))
    with pytest.raises(data.DataError, match="but there is no ''"):  # not the current folder
        corpus.read("")
    with pytest.raises(data.DataError, match=r"--dataset needs text, but .* has none; a folder's [.]txt"):
        corpus.read(str(tmp_path))


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


def test_pairs_are_ranks_of_byte_pairs_and_rare_pairs_share_the_last():
    pairs = [document[i : i + 2] for document in PAIRS for i in range(0, len(document) - 1, 2)]
    counts = collections.Counter(pairs)
    ranked = sorted(counts, key=lambda pair: (-counts[pair], pair))
    vocabulary = {pair: rank for rank, pair in enumerate(ranked[:2])}
    tokenizer = tokens.Pairs(PAIRS, vocabulary=3)
    encoded = [token for document in PAIRS for token in tokenizer.encode(document).tolist()]
    assert encoded == [vocabulary.get(pair, 2) for pair in pairs] == [0, 0, 0, 2, 0, 0, 1, 1]
    assert tokenizer.encode(b"cdefzz").tolist() == [2, 1, 2]
    for vocabulary in (1, 2**16 + 1):
        with pytest.raises(data.DataError, match=f"2 to 65536 tokens, got --vocabulary {vocabulary}"):
            tokens.Pairs(PAIRS, vocabulary)


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


def test_on_several_devices_the_batches_are_the_same_and_each_device_has_rows_of_its_own():
    token_ids = jnp.arange(50, dtype=jnp.uint16)
    devices = jax.make_mesh((2, 2, 1), mesh.AXES, axis_types=(AxisType.Auto,) * 3)
    for rows, of_each in ((8, 2), (3, 3)):  # four devices do not divide three rows, so each device has all rows
        batches = [text.windows(token_ids, 4, rows, 3, 5) for _ in range(2)]
        alone, spread = next(batches[0]), next(mesh.placed(devices, batches[1]))
        for name in ("context", "target"):
            np.testing.assert_array_equal(alone[name], spread[name])
            assert spread[name].addressable_shards[0].data.shape[0] == of_each


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
