"""GGUF reader: any bytes are read right, or refused in one line; nothing is allocated on a file's word."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.errors import ModelFileError
from meshllm.model.gguf import GgufFile, open_gguf
from meshllm.model.gguf_values import GgufArray, ValueType

Writer = Callable[..., bytes]


def read(data: bytes | bytearray) -> GgufFile:
    return open_gguf(memoryview(data), "m.gguf")


def refusal(data: bytes | bytearray) -> str:
    with pytest.raises(ModelFileError) as caught:
        read(data)
    message = str(caught.value)
    assert message.startswith("m.gguf: ")
    assert "\n" not in message
    return message


def test_metadata_and_tensors_are_read_as_written(write_gguf: Writer) -> None:
    metadata = {"a": 1, "b": -1.5, "c": True, "d": "ü", "e": ["x", "", "漢"], "f": [1, -2], "g": [0.5]}
    found = read(write_gguf(metadata, [("t", (32, 3), 8, bytes(range(102))), ("v", (5,), 0, bytes(20))]))
    assert (found.find_int("a"), found.find_float("b"), found.find_bool("c"), found.find_str("d")) == (
        1,
        -1.5,
        True,
        "ü",
    )
    assert found.find_strings("e") == ["x", "", "漢"]
    numbers, floats = found.find_numbers("f"), found.find_numbers("g")
    assert numbers is not None
    assert numbers.tolist() == [1, -2]
    assert floats is not None
    assert floats.tolist() == [0.5]
    assert found.find_int("absent") is None
    tensor = found.tensors["t"]
    assert (tensor.format.name, tensor.shape, tensor.size, tensor.offset % 32) == ("Q8_0", (3, 32), 102, 0)
    assert found.tensors["v"].shape == (1, 5)


def test_real_file_is_read_as_the_reference_package_reads_it(smollm2_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    theirs = gguf.GGUFReader(smollm2_path)
    data = np.memmap(smollm2_path, mode="r")
    ours = open_gguf(memoryview(data), "smollm2")
    assert {t.name: (int(t.tensor_type), t.data_offset, t.n_bytes) for t in theirs.tensors} == {
        t.name: (int(t.format), t.offset, t.size) for t in ours.tensors.values()
    }
    assert ours.find_strings("tokenizer.ggml.tokens") == theirs.fields["tokenizer.ggml.tokens"].contents()


def test_wrong_type_is_named_with_key_and_kind(write_gguf: Writer) -> None:
    found = read(write_gguf({"n": "text", "s": 3, "b": 1, "l": [1], "t": ["x"]}))
    for call, key in [
        (found.find_int, "n"),
        (found.find_float, "n"),
        (found.find_str, "s"),
        (found.find_bool, "b"),
        (found.find_strings, "l"),
        (found.find_numbers, "t"),
        (found.find_int, "l"),
    ]:
        with pytest.raises(ModelFileError, match=rf"m.gguf: {key} is .*, expected "):
            call(key)


def test_128k_vocabulary_opens_fast(shared_dir: Path) -> None:
    path = shared_dir / "data" / "llama-3.1.vocab.gguf"
    data = path.read_bytes()
    start = time.perf_counter()
    found = read(data)
    took = time.perf_counter() - start
    tokens = found.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, GgufArray)
    assert tokens.count == 128256
    assert took < 0.5


# --- cases from the field ---------------------------------------------------------------------------------------------

_LOAD = """
import resource, sys, tracemalloc
from meshllm.errors import MeshLLMError
from meshllm.model.model_file import ModelFile
with open("/proc/self/statm") as f:
    now = int(f.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (256 << 20),) * 2)
tracemalloc.start()
for path in sys.argv[1:]:
    try:
        ModelFile.open(path).hyperparameters
    except MeshLLMError as error:
        print(error)
    else:
        print("opened")
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
"""


def load_in_a_small_process(folder: Path, files: dict[str, bytes]) -> dict[str, str]:
    """What each file is refused with, in a process that may take 256 MiB more than it has."""
    for name, data in files.items():
        (folder / name).write_bytes(data)
    command = [sys.executable, "-c", _LOAD, *(str(folder / name) for name in files)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == len(files), lines
    return dict(zip(files, lines, strict=True))


@pytest.mark.parametrize("case", ["GGUF-01"], indirect=True)
def test_length_is_checked_before_it_is_used(case: dict[str, Any], tmp_path: Path) -> None:
    nested = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<I", 9)
    nested += struct.pack("<IQ", 9, 1) * 20000 + struct.pack("<IQB", 0, 1, 0)
    files = {f"{i}.gguf": bytes.fromhex(raw) for i, raw in enumerate(case["input"]["hex"].values())}
    found = load_in_a_small_process(tmp_path, {**files, "nested.gguf": nested})
    for name, message in found.items():
        assert message.startswith(f"{name}: ")
    assert "needs 140737488355312 bytes" in found["0.gguf"]
    assert "general.name" in found["1.gguf"]
    assert "1099511627776 elements" in found["2.gguf"]
    assert "array of arrays" in found["nested.gguf"]


@pytest.mark.parametrize("case", ["GGUF-03"], indirect=True)
def test_alignment_must_be_a_power_of_two(case: dict[str, Any], write_gguf: Writer) -> None:
    for raw in case["input"]["hex"].values():
        assert "general.alignment" in refusal(bytes.fromhex(raw))
    for value in (struct.pack("<IQ", 10, 32), struct.pack("<IQ", 8, 2) + b"32", struct.pack("<I", 4) + b"\0\0\2\0"):
        assert "general.alignment" in refusal(write_gguf({"general.alignment": value}))
    tensors = [("t", (1,), 0, bytes(4)), ("u", (1,), 0, bytes(4))]
    found = read(write_gguf({"general.alignment": 8}, tensors, alignment=8))
    assert found.tensors["u"].offset - found.tensors["t"].offset == 8


@pytest.mark.parametrize("case", ["GGUF-05"], indirect=True)
def test_dimension_of_zero_is_refused(case: dict[str, Any], write_gguf: Writer) -> None:
    assert "tensor w has dimensions [0, 8]" in refusal(bytes.fromhex(case["input"]["hex"]["tensor w dims [0,8]"]))
    for dimensions in [(8, 0), (2**63, 2), (2**32, 2**32), (1, 1, 1, 0)]:
        assert "tensor w has dimensions" in refusal(write_gguf({}, [("w", dimensions, 0, b"")]))


@pytest.mark.parametrize("case", ["GGUF-07"], indirect=True)
def test_incomplete_or_foreign_file_is_refused_by_what_it_is(
    case: dict[str, Any], smollm2_path: Path, tmp_path: Path
) -> None:
    with smollm2_path.open("rb") as file:
        head = file.read(60_000_000)
    html, v1, big_endian = (entry.split(": ")[-1] for entry in case["input"]["files"][4:])
    files = {
        "half.gguf": head,
        "head.gguf": head[:1000],
        "empty.gguf": b"",
        "page.gguf": bytes.fromhex(html),
        "v1.gguf": bytes.fromhex(v1),
        "big.gguf": bytes.fromhex(big_endian),
    }
    found = load_in_a_small_process(tmp_path, files)
    expected = {
        "half.gguf": "needs 98362432 bytes, file has 60000000",
        "head.gguf": "truncated|left",
        "empty.gguf": "empty",
        "page.gguf": "HTML",
        "v1.gguf": "version 1",
        "big.gguf": "big-endian",
    }
    for name, words in expected.items():
        assert any(word in found[name] for word in words.split("|")), found[name]
    data = bytearray(smollm2_path.read_bytes())
    del data[-1]
    message = refusal(data)
    assert "needs 98362432 bytes, file has 98362431" in message
    assert "tensor " in message


@pytest.mark.parametrize("case", ["GGUF-09"], indirect=True)
def test_empty_or_doubled_names_are_refused(case: dict[str, Any], write_gguf: Writer) -> None:
    empty, doubled = (bytes.fromhex(raw) for raw in case["input"]["hex"].values())
    assert "empty" in refusal(empty)
    assert "general.architecture" in refusal(doubled)
    assert "tensor w is there twice" in refusal(write_gguf({}, [("w", (1,), 0, bytes(4))] * 2))


@pytest.mark.parametrize("case", ["GGUF-11"], indirect=True)
def test_shard_of_a_split_model_is_never_taken_for_the_whole(case: dict[str, Any], tmp_path: Path) -> None:
    raw = bytes.fromhex(case["input"]["hex_shard1_header"])
    assert "shard 1 of 3" in refusal(raw)
    names = [f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    found = load_in_a_small_process(tmp_path, {names[0]: raw})
    assert "split model, shard 2 of 3 missing: model-00002-of-00003.gguf" in found[names[0]]
    found = load_in_a_small_process(tmp_path, {names[2]: raw})
    assert "shard 2 of 3 missing" in found[names[2]]
    found = load_in_a_small_process(tmp_path, {names[1]: raw})
    assert "merge" in found[names[1]]


# --- properties -------------------------------------------------------------------------------------------------------


def test_tensors_over_one_another_or_off_their_alignment_are_refused(write_gguf: Writer) -> None:
    good = bytearray(write_gguf({}, [("a", (16,), 0, bytes(64)), ("b", (16,), 0, bytes(64))]))
    place = good.index(b"b") + 1 + 4 + 8 + 4  # after name: number of dimensions, dimension, format
    overlapping, crooked = bytearray(good), bytearray(good)
    overlapping[place : place + 8] = struct.pack("<Q", 32)
    crooked[place : place + 8] = struct.pack("<Q", 65)
    read(good)
    assert "overlap" in refusal(overlapping)
    assert "multiple of 32" in refusal(crooked)


@pytest.mark.parametrize("n_tensors", [2**16 + 1, 2**64 - 1])
def test_counts_in_the_header_are_bounded(n_tensors: int) -> None:
    assert "at most" in refusal(b"GGUF" + struct.pack("<IQQ", 3, n_tensors, 0))
    assert "at most" in refusal(b"GGUF" + struct.pack("<IQQ", 3, 0, n_tensors))


def test_every_prefix_of_a_file_is_refused(write_gguf: Writer, tiny: Any) -> None:
    whole = write_gguf(*tiny)
    for end in (*range(0, 1500, 7), *range(1500, len(whole) - 32, 499)):
        refusal(whole[:end])


@given(st.data())
def test_damaged_bytes_are_read_or_refused_and_nothing_else(write_gguf: Writer, data: st.DataObject) -> None:
    raw = bytearray(
        write_gguf({"general.architecture": "llama", "x": ["a", "b"], "y": [1]}, [("t", (4,), 0, bytes(16))])
    )
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(raw) - 1))
        raw[place : place + 1] = data.draw(st.binary(min_size=0, max_size=9))
    try:
        found = read(raw)
    except ModelFileError as error:
        assert "\n" not in str(error)  # noqa: PT017 - both outcomes are right
        return
    for tensor in found.tensors.values():
        assert tensor.offset + tensor.size <= len(raw)
    for key, value in found.metadata.items():
        if isinstance(value, GgufArray) and value.element is ValueType.STRING:
            try:
                found.find_strings(key)
            except ModelFileError:
                continue
