"""Data: packing, splits, an order that resumes exactly, and clear refusals of what cannot be read."""

import collections
import json
import math
import os
import subprocess
import sys
import threading
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.train.data import Corpus, open_corpus
from k3jax.train.data.sources import TokenStream, find_files, read_stream
from k3jax.train.tokenizer import open_tokenizer

DOCUMENTS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12), min_size=1, max_size=12)


def stream_of(documents):
    tokens = np.concatenate([np.asarray(document, np.uint16) for document in documents])
    return TokenStream(tokens, np.cumsum([0] + [len(document) for document in documents]))


def counting_corpus(num_windows, seq_len=8, seed=0):
    """One document whose token values are their own positions."""
    return Corpus(stream_of([range(num_windows * seq_len + 1)]), seq_len=seq_len, seed=seed)


def train_ids(corpus, *, batch, count, position=0):
    """Sample ids of the next `count` batches."""
    return [b.sample_ids.tolist() for b in islice(corpus.batches("train", batch, position), count)]


def both_splits(corpus):
    """Every window once, by id: (tokens, targets, segments) as lists."""
    rows = {}
    epoch = islice(corpus.batches("train", 1), corpus.train.num_sequences)
    for batch in [*epoch, *corpus.batches("held_out", 1)]:
        assert batch.sample_ids[0] not in rows
        rows[int(batch.sample_ids[0])] = tuple(x[0].tolist() for x in (batch.tokens, batch.targets, batch.segment_ids))
    return rows


# Packing


def packed_by_loop(documents, seq_len):
    """The packing rule, one token at a time."""
    flat = [(token, d) for d, document in enumerate(documents) for token in document]
    windows = {}
    for w in range(math.ceil((len(flat) - 1) / seq_len)):
        tokens, targets, segments = [], [], []
        first_document = flat[w * seq_len][1]
        for p in range(w * seq_len, (w + 1) * seq_len):
            token, document = flat[p] if p < len(flat) else (-1, len(documents))
            following, its_document = flat[p + 1] if p + 1 < len(flat) else (-1, None)
            tokens.append(token)
            targets.append(following if document == its_document else -1)
            segments.append(document - first_document)
        windows[w] = tokens, targets, segments
    return windows


@pytest.mark.quick
@settings(max_examples=60)
@given(DOCUMENTS, st.integers(1, 9), st.integers(0, 3))
def test_packing_equals_a_loop_over_tokens(documents, seq_len, seed):
    total = sum(map(len, documents))
    if total <= seq_len or total == len(documents):
        with pytest.raises(ValueError, match="needs"):
            Corpus(stream_of(documents), seq_len=seq_len, seed=seed)
        return
    windows = both_splits(Corpus(stream_of(documents), seq_len=seq_len, seed=seed))
    assert windows == packed_by_loop(documents, seq_len)
    # Nothing is dropped and nothing is learned twice: the targets are all tokens but each document's first.
    targets = [t for _, row, _ in windows.values() for t in row if t >= 0]
    assert sorted(targets) == sorted(token for document in documents for token in document[1:])


def test_held_out_pass_is_in_order_and_ends_in_padding_sequences():
    corpus = counting_corpus(100)
    assert corpus.held_out.num_sequences == 5
    batches = list(corpus.batches("held_out", 4))
    assert [b.sample_ids.tolist() for b in batches] == [
        corpus.held_out.windows[:4].tolist(),
        [corpus.held_out.windows[4], -1, -1, -1],
    ]
    assert [b.position for b in batches] == [4, 5]
    last = batches[-1]
    assert (last.tokens[1:] == -1).all() and (last.targets[1:] == -1).all()
    assert (last.segment_ids[1:] == 0).all()
    for array in (last.tokens, last.targets, last.segment_ids):
        assert array.dtype == np.int32 and array.shape == (4, 8)


@pytest.mark.parametrize("num_windows", [1, 2, 3, 19, 20, 39, 40, 100, 1013])
def test_every_window_is_in_exactly_one_split(num_windows):
    corpus = counting_corpus(num_windows, seq_len=2)
    train, held_out = corpus.train.windows, corpus.held_out.windows
    assert sorted([*train, *held_out]) == list(range(num_windows))
    assert len(held_out) == (max(1, num_windows // 20) if num_windows > 1 else 0)
    if num_windows > 1:  # one in each equal stretch: no gap is longer than two stretches
        assert np.diff([0, *held_out, num_windows]).max() <= 2 * math.ceil(num_windows / len(held_out))
    assert len(list(corpus.batches("held_out", 4))) == math.ceil(len(held_out) / 4)


@settings(max_examples=30)
@given(DOCUMENTS.filter(lambda documents: sum(map(len, documents)) > max(4, len(documents))))
def test_unigram_entropy_is_that_of_the_training_targets(documents):
    corpus = Corpus(stream_of(documents), seq_len=3, seed=0)
    epoch = islice(corpus.batches("train", 1), corpus.train.num_sequences)
    counts = collections.Counter(int(t) for batch in epoch for t in batch.targets.ravel() if t >= 0)
    if not counts:
        with pytest.raises(ValueError, match="0 training targets"):  # they all fell into the held-out split
            corpus.unigram_entropy()
        return
    shares = [n / counts.total() for n in counts.values()]
    # float64 sums of fewer than ten terms
    assert corpus.unigram_entropy() == pytest.approx(-sum(p * math.log(p) for p in shares), abs=1e-12)


# Order


@pytest.mark.quick
def test_resume_in_mid_epoch_sees_the_ids_of_an_uninterrupted_run():
    corpus = counting_corpus(42, seed=3)
    batch, per_epoch = 4, 10
    assert corpus.train.num_sequences == batch * per_epoch
    whole = train_ids(corpus, batch=batch, count=25)
    position = next(islice(corpus.batches("train", batch), 12, None)).position  # stop after step 13
    assert position == 13 * batch
    reopened = counting_corpus(42, seed=3)
    assert train_ids(reopened, batch=batch, count=12, position=position) == whole[13:25]
    # Twice the data ranks at the same global batch: the ranks' rows are other pieces of the same samples.
    for ranks in (2, 4):
        resumed = reopened.batches("train", batch, position)
        rows = [np.split(next(resumed).sample_ids, ranks) for _ in range(12)]
        assert [np.concatenate(pieces).tolist() for pieces in rows] == whole[13:25]
    for epoch in (whole[:10], whole[10:20]):
        assert sorted(sum(epoch, [])) == corpus.train.windows.tolist()
    assert whole[:10] != whole[10:20]


# grain's shuffle takes some 50 ms / n for an index out of n: windows are not too few here, batches not too large.
@settings(max_examples=20)
@given(st.integers(20, 60), st.integers(0, 2**40), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_the_order_does_not_depend_on_the_batch_sizes(num_windows, seed, sizes):
    corpus = counting_corpus(num_windows, seq_len=2, seed=seed)
    pieces, position = [], 0
    for size in sizes:  # another batch size at every restart
        batch = next(corpus.batches("train", size, position))
        pieces += batch.sample_ids.tolist()
        position = batch.position
    assert position == sum(sizes)
    assert [pieces] == train_ids(corpus, batch=position, count=1)


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_some_rows_of_a_batch_are_those_of_the_whole_batch(split):
    corpus, rows = counting_corpus(50), np.array([1, 2, 5])
    whole, some = (islice(corpus.batches(split, 6, rows=which), 3) for which in (None, rows))
    for all_of_it, part in zip(whole, some, strict=True):
        np.testing.assert_array_equal(part.sample_ids, all_of_it.sample_ids)
        assert part.position == all_of_it.position
        for name in ("tokens", "targets", "segment_ids"):
            np.testing.assert_array_equal(getattr(part, name), getattr(all_of_it, name)[rows])


@pytest.mark.parametrize("num_windows", [1, 2, 64, 257])
def test_each_id_is_seen_once_an_epoch(num_windows):
    corpus = counting_corpus(num_windows, seq_len=2)
    size = corpus.train.num_sequences
    for epoch in train_ids(corpus, batch=size, count=5):
        assert sorted(epoch) == corpus.train.windows.tolist()


def test_epochs_and_seeds_each_have_their_own_permutation():
    orders = [tuple(ids) for seed in range(4) for ids in train_ids(counting_corpus(42, seed=seed), batch=40, count=4)]
    assert len(set(orders)) == len(orders)


def test_closing_the_iterator_ends_its_thread():
    threads = set(threading.enumerate())
    batches = counting_corpus(42).batches("train", 4)
    next(batches)
    workers = set(threading.enumerate()) - threads
    assert workers
    batches.close()
    for worker in workers:
        worker.join(timeout=60)
        assert not worker.is_alive()


def test_import_is_light_and_a_process_that_just_ends_ends_quietly(tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(100))
    program = f"""
import sys
from k3jax.train.data import open_corpus
corpus = open_corpus({str(tmp_path / "tokens.npy")!r}, vocab_size=100, seq_len=8, seed=0)
assert not {{"grain", "tokenizers", "jax"}} & set(sys.modules), "heavy imports belong to first use"
batches = corpus.batches("train", 1)
next(batches)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=120, cwd=os.getcwd()
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("arguments", [("test", 1, 0), ("train", 0, 0), ("train", 1, -1)])
def test_batches_refuses_bad_arguments_before_the_first_batch(arguments):
    with pytest.raises(ValueError, match="must be|need"):
        counting_corpus(4).batches(*arguments)


# Fingerprint


def test_fingerprint_tells_what_changes_the_samples_and_nothing_else(tmp_path):
    base = stream_of([[1, 2, 3], [4, 5, 6]])

    def fingerprint(stream, seq_len=2, seed=0):
        return Corpus(stream, seq_len=seq_len, seed=seed).fingerprint

    others = [
        fingerprint(base, seq_len=3),
        fingerprint(base, seed=1),
        fingerprint(stream_of([[1, 2, 3, 4], [5, 6]])),
        fingerprint(stream_of([[1, 2, 3], [4, 5, 7]])),
    ]
    assert len({fingerprint(base), *others}) == 5
    np.save(tmp_path / "a.npy", np.asarray([[1, 2, 3], [4, 5, 6]], ">i8"))
    assert fingerprint(read_stream(str(tmp_path / "a.npy"), vocab_size=7)) == fingerprint(base)


# Sources


def documents_of(stream):
    return [stream.tokens[a:b].tolist() for a, b in zip(stream.starts[:-1], stream.starts[1:], strict=True)]


def test_text_jsonl_and_directories_give_the_same_documents(tmp_path):
    texts = ["first\r\n", "zweites: größer", "3"]
    expected = [[*text.encode(), 256] for text in texts]
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    for name, text in zip(["a.txt", "b.md", "sub/c.txt"], texts, strict=True):
        (folder / name).write_bytes(text.encode())
    (folder / "empty.txt").touch()
    (folder / ".hidden").write_bytes(b"\xff")
    lines = tmp_path / "lines.jsonl"
    lines.write_text("\n".join(json.dumps({"id": 1, "text": text}) for text in [*texts, ""]) + "\n\n")
    for spec in (folder, lines, f"{folder}/**/*.[tm]*", f"{folder}/a.txt, {folder}/b.md,{folder}/sub"):
        assert documents_of(read_stream(str(spec), vocab_size=257)) == expected, spec


@pytest.mark.parametrize("dtype", ["uint8", "int16", ">i4", "uint64", "int64"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_token_arrays_are_documents_by_row_and_stay_on_disk(tmp_path, dtype, order):
    path = tmp_path / "tokens.npy"
    rows = np.arange(12).reshape(3, 4) % 7
    np.save(path, np.asarray(rows, dtype, order=order))
    stream = read_stream(str(path), vocab_size=7)
    assert documents_of(stream) == rows.tolist()
    owner = stream.tokens
    while isinstance(owner, np.ndarray) and owner.base is not None and not isinstance(owner, np.memmap):
        owner = owner.base
    assert order == "F" or isinstance(owner, np.memmap)  # Fortran order has to be put in row order, in memory
    corpus = Corpus(stream, seq_len=2, seed=0)
    assert both_splits(corpus) == packed_by_loop(rows.tolist(), 2)
    assert corpus.unigram_entropy() > 0


def test_one_dimension_is_one_document_and_sources_mix(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(5))
    np.save(tmp_path / "b.npy", np.asarray([[70000, 1]]))
    (tmp_path / "c.txt").write_text("hi")
    stream = read_stream(f"{tmp_path}/a.npy,{tmp_path}/c.txt,{tmp_path}/b.npy", vocab_size=70001)
    assert documents_of(stream) == [[0, 1, 2, 3, 4], [104, 105, 256], [70000, 1]]


def test_the_standard_library_is_source_text_without_tests_or_installed_packages():
    files = find_files("stdlib")
    names = {path.name for path in files}
    assert {"argparse.py", "typing.py"} <= names and all(name.endswith(".py") for name in names)
    excluded = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    root = os.path.commonpath(files)
    assert not any(excluded & set(path.relative_to(root).parts) for path in files)
    corpus = open_corpus("stdlib", vocab_size=320, seq_len=128, seed=0)
    stream = read_stream("stdlib", vocab_size=320)
    assert documents_of(stream)[0] == [*files[0].read_bytes(), 256]
    assert stream.tokens.dtype == np.uint16
    description = corpus.describe()
    assert description.startswith("stdlib: ") and corpus.fingerprint in description and "\n" not in description
    assert 2.5 < corpus.unigram_entropy() < 4.0  # nats a byte of source text: between a few letters and all of ASCII


# Tokenizer files


def save_tokenizer(path, *, special=(), unknown="?"):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: i for i, word in enumerate([*special, "a", "b", "c", "?"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(special))
    tokenizer.enable_truncation(2)  # as files meant for inference have: it must not cut documents
    tokenizer.save(str(path))
    return str(path)


@pytest.mark.parametrize("special", ["<|endoftext|>", "</s>", None])
def test_tokenizer_file_closes_documents_with_its_own_token_if_it_has_one(tmp_path, special):
    file = save_tokenizer(tmp_path / "tokenizer.json", special=[special] if special else [])
    (tmp_path / "x.jsonl").write_text('{"text": "a b c a"}\n{"text": "  "}\n{"text": "c x"}\n')
    ids = open_tokenizer(file, vocab_size=10)
    shift = 1 if special else 0
    assert ids.end_of_document == (0 if special else None)
    a, b, c, unknown = (i + shift for i in range(4))
    end = [0] if special else []
    stream = read_stream(f"{tmp_path}/x.jsonl", vocab_size=10, tokenizer=file)
    assert documents_of(stream) == [[a, b, c, a, *end], [c, unknown, *end]]
    assert ids.decode([a, c, *end]).split() == ["a", "c"]


def test_bytes_go_there_and_back():
    ids = open_tokenizer(None, vocab_size=257)
    assert ids.decode([*next(iter(ids.encode(["größer\n"]))), 256, 300, -1]) == "größer\n"
    assert ids.decode([0xC3]) == "\ufffd"


# Refusals


REFUSED = {
    "missing.txt": (None, r"missing\.txt.* does not exist"),
    "none*.txt": (None, r"none\*\.txt.* matches no file"),
    "empty.txt": (b"", r"empty\.txt.* no documents"),
    "few.txt": (b"short", r"few\.txt.* has 6 tokens.* at least 17"),
    "latin.txt": (b"gr\xf6\xdfer", r"latin\.txt: not UTF-8, byte 2 is 0xf6"),
    "bad.jsonl": (b'{"text": "a"}\n{"text": \n', r"bad\.jsonl:2: not JSON"),
    "latin.jsonl": (b'{"text": "a"}\n\n{"text": "\xf6"}\n', r"latin\.jsonl:3: not UTF-8"),
    "field.jsonl": (b'{"body": "a", "n": 1}\n', r"field\.jsonl:1: got no 'text' but 'body', 'n'"),
    "null.jsonl": (b'{"text": null}\n', r"null\.jsonl:1: got 'text' of type NoneType"),
    "list.jsonl": (b"[1]\n", r"list\.jsonl:1: got a JSON list"),
    "half.jsonl": (b'{"text": "\\ud800"}\n', r"half\.jsonl:1: 'text' is no valid Unicode"),
    "deep.jsonl": (b"[" * 100_000, r"deep\.jsonl:1: not JSON"),
    "float.npy": (np.arange(40.0), r"float\.npy: got float64 of shape \(40,\).* must be integers"),
    "bool.npy": (np.ones(40, bool), r"bool\.npy: got bool"),
    "object.npy": (np.asarray([1, "a"], object), r"object\.npy: got object"),
    "cube.npy": (np.zeros((2, 20, 2), int), r"cube\.npy: got int64 of shape \(2, 20, 2\)"),
    "scalar.npy": (np.asarray(3), r"scalar\.npy: got int64 of shape \(\)"),
    "void.npy": (np.zeros((0, 3), int), r"void\.npy: holds no tokens"),
    "negative.npy": (np.arange(40) - 7, r"negative\.npy: token id -7.* less than vocab_size 320"),
    "large.npy": (np.arange(40) * 10, r"large\.npy: token id 390.* less than vocab_size 320"),
    "noise.npy": (b"not an array at all", r"noise\.npy: not a \.npy array"),
    "nothing.npy": (b"", r"nothing\.npy: not a \.npy array"),
    "columns.npy": (np.zeros((40, 1), int), r"columns\.npy.* one token each"),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", REFUSED)
def test_data_that_cannot_be_used_is_refused_in_one_line(tmp_path, name):
    content, message = REFUSED[name]
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content is not None:
        np.save(tmp_path / name, content)
    with pytest.raises((ValueError, OSError), match=message) as refusal:
        open_corpus(str(tmp_path / name), vocab_size=320, seq_len=16, seed=0)
    assert "\n" not in str(refusal.value)


def test_a_truncated_array_is_refused_with_both_sizes(tmp_path):
    path = tmp_path / "cut.npy"
    np.save(path, np.arange(100, dtype=np.int32))
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"cut\.npy: truncated, 200 bytes; int32 of shape \(100,\) needs 528"):
        open_corpus(str(path), vocab_size=320, seq_len=16, seed=0)


@pytest.mark.parametrize("spec", ["", "a.txt,", ","])
def test_an_empty_item_is_refused(spec, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("x" * 100)
    with pytest.raises(ValueError, match="empty item"):
        open_corpus(spec, vocab_size=320, seq_len=16, seed=0)


def test_a_vocabulary_that_is_too_small_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 100)
    with pytest.raises(ValueError, match=r"bytes has ids up to 256.* vocab_size is 256: it must be at least 257"):
        open_corpus(f"{tmp_path}/a.txt", vocab_size=256, seq_len=16, seed=0)
    file = save_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match=r"tokenizer\.json has ids up to 3.* vocab_size is 3: it must be at least 4"):
        open_tokenizer(file, vocab_size=3)


def test_tokenizer_files_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent.json"):
        open_tokenizer(str(tmp_path / "absent.json"), vocab_size=320)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"bad\.json: not a tokenizer\.json") as refusal:
        open_tokenizer(str(tmp_path / "bad.json"), vocab_size=320)
    assert "\n" not in str(refusal.value)
    file = save_tokenizer(tmp_path / "no_unknown.json", unknown="absent")
    with pytest.raises(ValueError, match=r"no_unknown\.json: cannot encode"):
        list(open_tokenizer(file, vocab_size=320).encode(["a x"]))


@pytest.mark.parametrize("seq_len", [0, -1])
def test_seq_len_must_be_positive(seq_len):
    with pytest.raises(ValueError, match="seq_len"):
        Corpus(stream_of([[1, 2, 3]]), seq_len=seq_len, seed=0)
