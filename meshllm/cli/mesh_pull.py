"""`pull` by way of the daemon: a whole file from the devices that serve it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from meshllm.daemon.model_store import valid_name
from meshllm.errors import NoDaemonError, NoModelError, UnavailableError, UsageError
from meshllm.status import FetchStatus

if TYPE_CHECKING:
    from meshllm.cli.client import DaemonClient
    from meshllm.daemon.model_sources import Progress
    from meshllm.daemon.model_store import ModelStore, StoredModel

POLL_S: Final = 0.3  # the daemon goes on as long as it is asked


def is_path(source: str) -> bool:
    """Whether a file of this device is meant, or an address."""
    return "/" in source or source.endswith(".gguf") or Path(source).is_file()


def pull_from_mesh(
    client: DaemonClient, store: ModelStore, source: str, name: str | None, progress: Progress
) -> tuple[StoredModel, str] | None:
    """The model and one phrase that says where it came from; None where no daemon works on this state folder or no
    device serves it. Raises UnavailableError where it stops on the way; what has come is kept for the next try.
    """
    if name is not None and not valid_name(name):
        raise UsageError(f"{name!r} cannot name a model: letters, digits and . _ : + -, at most 128")
    body = {"source": source, "name": name, "state_dir": str(store.folder.parent.resolve())}
    givers: dict[str, None] = {}
    while True:
        try:
            status = msgspec.convert(client.post("/models/pull", body), FetchStatus)
        except (NoDaemonError, NoModelError, UnavailableError, msgspec.ValidationError):
            return None
        givers |= dict.fromkeys(status.sources)
        if status.is_whole:
            return store.resolve(name or source), f"from {', '.join(givers)}" if givers else "was here already"
        if status.error:
            raise UnavailableError(status.error)
        if status.wanted_bytes:
            progress(f"copying {source} from other devices", status.done_bytes, status.wanted_bytes)
        time.sleep(POLL_S)
