"""A partial file as a model that is served: its head read, and which chunks a slice of it needs."""

from __future__ import annotations

from meshllm.daemon.partial_file import PartialFile, PartialModelFile
from meshllm.daemon.served_model import ServedModel
from meshllm.kernels.binding import guard_map
from meshllm.mesh.manifest import Manifest
from meshllm.model.slice_bytes import slice_ranges
from meshllm.model.slicing import Slice


def chunks_of(served: ServedModel, part: Slice) -> list[int]:
    """Chunks that a slice of a partial file needs, the head's with them."""
    assert served.part is not None
    manifest: Manifest = served.part.manifest
    ranges = slice_ranges(served.file.gguf, served.file.hyperparameters, part)
    return manifest.chunks_of([(0, manifest.head_bytes), *ranges])


def open_part(part: PartialFile) -> ServedModel:
    """The file to serve, of which the head is here. Blocks. Raises ModelFileError."""
    file = PartialModelFile.open(part.path)
    try:
        guard_map(file, file.data)
        _ = file.hyperparameters, file.tokenizer, file.chat_template
        served = ServedModel(part.name, part.sha256, part.manifest.size, file, part)
        part.parts = tuple(one for one in part.parts if part.has_all(chunks_of(served, one)))
    except BaseException:
        file.close()
        raise
    return served
