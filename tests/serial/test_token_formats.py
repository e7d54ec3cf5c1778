"""Token files of other programs are read with their ids and documents; damaged files are refused."""

import json

import numpy as np
import pytest
from corpora import load_corpus

from zero_mpi.data.documents import TokenSpans
from zero_mpi.data.text_files import collect_files
from zero_mpi.data.token_formats import read_tokens, token_files
from zero_mpi.errors import UsageError

VOCABULARY = 60_000
DOCUMENTS = [[5, 6, 7], [8], [], [9, 10, 59_999, 12], [0, 1]]
IDS = [i for document in DOCUMENTS for i in document]
ENDS = [3, 4, 8, 10]


def write_npy(folder, documents=DOCUMENTS, dtype=np.uint16):
    np.save(folder / "tokens.npy", np.array([i for each in documents for i in each], dtype))
    return folder / "tokens.npy"


def write_llm_c(folder, magic=20240520, version=1, dtype="<u2", count=None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(IDS) if count is None else count
    (folder / "tokens.bin").write_bytes(header.tobytes() + np.array(IDS, dtype).tobytes())
    return folder / "tokens.bin"


def write_nanogpt(folder):
    np.array(IDS, np.uint16).tofile(folder / "tokens.bin")
    return folder / "tokens.bin"


def write_megatron(folder, code=8, dtype="<u2", **changes):
    """Write files as Megatron's IndexedDatasetBuilder does: a sequence is a document or part of one."""
    sequences = [len(each) for each in DOCUMENTS]
    values = {"sizes": sequences, "borders": range(len(DOCUMENTS) + 1), "magic": b"MMIDIDX\0\0", "version": 1}
    values |= changes
    places = np.cumsum([0, *sequences[:-1]]) * np.dtype(dtype).itemsize
    counts = np.array([len(values["sizes"]), len(values["borders"])], "<u8").tobytes()
    (folder / "tokens.bin").write_bytes(np.array(IDS, dtype).tobytes())
    (folder / "tokens.idx").write_bytes(
        values["magic"] + np.uint64(values["version"]).tobytes() + bytes([code]) + counts
        + np.array(values["sizes"], "<i4").tobytes() + np.array(places, "<i8").tobytes()
        + np.array(values["borders"], "<i8").tobytes()
    )  # fmt: skip
    return folder / "tokens.bin"


def write_arrow(folder, kind="int32", column="input_ids", large=False, stream=True, labels=(), **options):
    """Write a stream of batches as `datasets` does; the first batch is a slice without its first row."""
    arrow = pytest.importorskip(
        "pyarrow", reason="the package pyarrow is not installed", exc_type=ImportError
    )
    lists = (arrow.large_list if large else arrow.list_)(getattr(arrow, kind)())
    marks = arrow.list_(arrow.int8())
    schema = arrow.schema([("other", arrow.string()), (column, lists), ("labels", marks)])
    path = folder / "data-00000-of-00001.arrow"
    new = arrow.ipc.new_stream if stream else arrow.ipc.new_file
    with new(path, schema, options=arrow.ipc.IpcWriteOptions(**options)) as out:
        for rows in ([[1, 2], *DOCUMENTS[:2]], DOCUMENTS[2:]):
            columns = [arrow.array(["x"] * len(rows)), arrow.array(rows, lists)]
            columns.append(arrow.array([labels] * len(rows), marks))
            batch = arrow.record_batch(columns, schema)
            out.write_batch(batch.slice(1) if rows[0] == [1, 2] else batch)
    return path


def read(path, name="", vocab=VOCABULARY):
    return read_tokens(name or path.name, path, vocab)


def ids_of(document):
    assert isinstance(document.tokens, TokenSpans)
    return document.tokens.read_all().tolist()


@pytest.mark.parametrize(
    ("write", "options", "ends"),
    [
        (write_npy, {}, None),
        (write_npy, {"dtype": np.uint32}, None),
        (write_llm_c, {}, None),
        (write_llm_c, {"magic": 20240801, "version": 7, "dtype": "<u4"}, None),
        (write_megatron, {}, ENDS),
        (write_megatron, {"code": 4, "dtype": "<i4"}, ENDS),
        (write_megatron, {"code": 5, "dtype": "<i8"}, ENDS),
        (write_megatron, {"borders": [0, 2, 2, 5]}, [4, 10]),
        (write_arrow, {"labels": [1, 2]}, ENDS),
        (write_arrow, {"kind": "int64"}, ENDS),
        (write_arrow, {"kind": "uint16", "large": True}, ENDS),
        (write_arrow, {"stream": False}, ENDS),
    ],
)
def test_each_format_gives_what_was_written(write, options, ends, tmp_path):
    file = read(write(tmp_path, **options))
    assert ids_of(file) == IDS
    assert (None if file.ends is None else file.ends.tolist()) == ends
    wide = max(span.dtype.itemsize for span in file.tokens.spans) > 2
    assert file.tokens.dtype == (np.uint32 if wide else np.uint16)
    read_there = file.tokens.read(np.array([2, 7]), np.array([3, 2]))
    assert read_there.tolist() == IDS[2:5] + IDS[7:9]


def test_ids_without_a_header_are_said_to_be_some(tmp_path):
    path = write_nanogpt(tmp_path)
    assert not token_files(collect_files([str(path)]))
    ((name, place),) = collect_files([f"nanogpt:{path}"])
    assert (name, place) == ("nanogpt:tokens.bin", path)
    assert ids_of(read(place, name)) == IDS
    options = {"val_fraction": 0.0, "context": 4, "seed": 0, "tokenizer": None, "vocab_size": VOCABULARY}
    assert load_corpus([f"nanogpt:{path}"], **options).train.ids.read_all().tolist() == IDS
    (tmp_path / "odd.bin").write_bytes(b"123")
    with pytest.raises(UsageError, match=r"cannot read .*odd.bin as a token file: expected ids of two bytes"):
        read(tmp_path / "odd.bin", "nanogpt:odd.bin")


@pytest.mark.parametrize(
    ("write", "options", "message"),
    [
        (write_llm_c, {"count": 11}, "1046 bytes.* 1044"),
        (write_megatron, {"version": 2}, "found .*, version 2"),
        (write_megatron, {"code": 7}, "found float32"),
        *((write_megatron, {"borders": b}, "from 0 to 5") for b in ([0, 3, 2, 5], [0, 4], [])),
        (write_megatron, {"sizes": [3, 1, 0, 3, 3]}, "sequences"),
        (write_megatron, {"code": 4}, "expected [0-9]+ bytes"),
        (write_arrow, {"column": "text"}, "input_ids, found other, text, labels"),
        (write_arrow, {"kind": "float32"}, "found float"),
        (write_arrow, {"labels": [1, -100]}, "-100 in labels"),
        (write_arrow, {"compression": "zstd"}, "compressed"),
    ],
)
def test_what_is_not_sound_is_one_line(write, options, message, tmp_path):
    with pytest.raises(UsageError, match=f"cannot read .* as a token file: .*{message}"):
        read(write(tmp_path, **options))


@pytest.mark.parametrize("write", [write_npy, write_llm_c, write_megatron, write_arrow])
def test_ids_outside_the_vocabulary_are_refused_by_their_place(write, tmp_path):
    with pytest.raises(UsageError, match=r"id 59999 at byte .* 100"):
        read(write(tmp_path), vocab=100)
    path = write_megatron(tmp_path, code=4, dtype="<i4")
    data = bytearray(path.read_bytes())
    data[8:12] = b"\xff" * 4
    path.write_bytes(data)
    with pytest.raises(UsageError, match="id -1 at byte "):
        read(path)


def test_what_lies_beside_token_files_is_no_text(tmp_path):
    write_megatron(tmp_path)
    files = collect_files([str(tmp_path)])
    assert [name for name, _ in token_files(files)] == ["tokens.bin"]
    other = tmp_path / "saved"
    other.mkdir()
    write_arrow(other)
    for name in ("dataset_info.json", "state.json"):
        (other / name).write_text(json.dumps({}))
    assert len(token_files(collect_files([str(other)]))) == 1


def test_documents_of_token_files_are_held_out_whole(tmp_path):
    paths = [str(write_megatron(tmp_path))]
    options = {"val_fraction": 0.5, "context": 1, "seed": 0, "tokenizer": None, "vocab_size": VOCABULARY}
    corpus = load_corpus(paths, **options)
    assert (corpus.documents, corpus.val_documents) == (4, 1)
    assert (corpus.train.size, corpus.val.size) == (8, 2)
    assert (corpus.train.ends.tolist(), corpus.val.ends.tolist()) == ([3, 4, 8], [2])
    assert corpus.val.ids.read_all().tolist() == DOCUMENTS[-1]
    (tmp_path / "more").mkdir()
    corpus = load_corpus([*paths, str(write_megatron(tmp_path / "more", borders=[0, 1, 5]))], **options)
    assert (corpus.documents, corpus.val_documents) == (6, 2)
    assert corpus.val.ends.tolist() == [2, 9]
    assert corpus.val.ids.read_all().tolist() == [*DOCUMENTS[-1], *IDS[3:]]


def test_documents_of_token_files_are_packed(tmp_path):
    paths = [str(write_arrow(tmp_path))]
    options = {"val_fraction": 0.0, "context": 4, "seed": 0, "tokenizer": None, "vocab_size": VOCABULARY}
    assert load_corpus(paths, packs=True, **options).train.ends.tolist() == ENDS
    with pytest.raises(UsageError, match=r"tokens.npy does not mark the ends of documents"):
        load_corpus([str(write_npy(tmp_path))], packs=True, **options)
