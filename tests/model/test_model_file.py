"""Model files: what opens, what does not, and how long views live."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshllm.errors import ModelFileError, NoModelError
from meshllm.model.model_file import ModelFile


def test_tensor_is_a_view_of_the_file(smollm2_path: Path) -> None:
    with ModelFile.open(smollm2_path) as model:
        info = model.gguf.tensors["blk.0.attn_q.weight"]
        view = model.tensor("blk.0.attn_q.weight")
        assert len(view) == info.size == 576 * 576 // 32 * 20
        with smollm2_path.open("rb") as file:
            file.seek(info.offset)
            assert file.read(64) == view[:64]
        with pytest.raises(ModelFileError, match="tensor nope is missing"):
            model.tensor("nope")


def test_view_outlives_close(smollm2_path: Path) -> None:
    model = ModelFile.open(smollm2_path)
    view = model.tensor("output_norm.weight")
    model.close()
    assert any(view)


def test_missing_or_unreadable_path_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(NoModelError, match=r"nope\.gguf: no such file"):
        ModelFile.open(tmp_path / "nope.gguf")
    with pytest.raises(ModelFileError, match="cannot be read"):
        ModelFile.open(tmp_path)


def test_invalid_template_is_refused_with_the_file_s_name(
    tmp_path: Path, write_gguf: Callable[..., bytes], tiny: Any
) -> None:
    metadata, tensors = tiny
    path = tmp_path / "m.gguf"
    path.write_bytes(write_gguf({**metadata, "tokenizer.chat_template": "{% if %}"}, tensors))
    with ModelFile.open(path) as model, pytest.raises(ModelFileError, match=r"m\.gguf: tokenizer\.chat_template"):
        _ = model.chat_template


def test_file_without_a_template_has_none(tmp_path: Path, write_gguf: Callable[..., bytes], tiny: Any) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(write_gguf(*tiny))
    with ModelFile.open(path) as model:
        assert model.chat_template is None
        assert model.tokenizer.encode("abba", parse_special=False) == [2, 1, 0]


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    """Opening it would wait for a writer for ever."""
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelFileError, match="no regular file"):
        ModelFile.open(tmp_path / "pipe.gguf")
