"""What must hold after every event, whatever the world does."""

from __future__ import annotations

from dataclasses import dataclass, field

from data_plane import right_answer

from meshllm.mesh.actions import Admit, CommitEpoch, Deliver, PrepareEpoch, Resuming
from meshllm.mesh.messages import Epoch, Failed, Finished, RequestId, Submit, Tokens

# Why an answer may be given up: nothing to go on with, or a loss each time before the first token.
REASONS = (
    "no layout came into force",
    "this daemon is stopping",
    "no token came in 6 attempts",
    "serves another model",
    "cannot go on with its model",
)


@dataclass
class Reader:
    """A request as its reader sees it."""

    submit: Submit
    root: int
    began: float
    tokens: list[int] = field(default_factory=list)
    ended: Finished | Failed | None = None
    cancelled: bool = False
    gone: bool = False  # its daemon died


class Invariants:
    """Collects what processes did and compares."""

    def __init__(self) -> None:
        self.layouts: dict[Epoch, object] = {}
        self.members: dict[Epoch, dict[str, None]] = {}
        self.ready: dict[Epoch, dict[str, None]] = {}
        self.committed: dict[tuple[int, int], Epoch] = {}  # (process, life) -> largest
        self.dials: dict[tuple[Epoch, frozenset[str]], str] = {}
        self.readers: dict[RequestId, Reader] = {}
        self.commits = 0
        self.resumed = 0  # answers that went on after a loss

    def prepares(self, own: str, action: PrepareEpoch) -> None:
        """One layout an epoch; exactly one end of a pair dials."""
        placement = tuple((share.node, share.slice) for share in action.layout.shares)
        assert self.layouts.setdefault(action.epoch, placement) == placement, f"two layouts in {action.epoch}"
        assert action.rank == action.layout.rank_of(own)
        assert action.driver == (action.epoch.driver == own)
        self.members.setdefault(action.epoch, dict.fromkeys([own, *action.members]))
        assert self.members[action.epoch].keys() == {own, *action.members}
        for node, _ in action.dial:
            pair = (action.epoch, frozenset((own, node)))
            assert self.dials.setdefault(pair, own) == own, f"both ends dial in {action.epoch}"

    def prepared(self, epoch: Epoch, own: str) -> None:
        self.ready.setdefault(epoch, {})[own] = None

    def commits_epoch(self, who: tuple[int, int], action: CommitEpoch) -> None:
        """Epochs grow, and nothing is committed that a member has not prepared."""
        before = self.committed.get(who)
        assert before is None or action.epoch > before, f"committed {action.epoch} after {before}"
        self.committed[who] = action.epoch
        missing = self.members[action.epoch].keys() - self.ready.get(action.epoch, {}).keys()
        assert not missing, f"{action.epoch} committed without {missing}"
        self.commits += 1

    def admits(self, who: tuple[int, int], action: Admit) -> None:
        """Requests run in the newest epoch committed there."""
        assert self.committed.get(who) == action.epoch, f"admitted to {action.epoch}"

    def delivers(self, action: Deliver) -> None:
        """A reader has a prefix of the right answer; after its end, and after leaving, it gets nothing."""
        reader = self.readers[action.request]
        assert reader.ended is None, "something came after the end"
        assert not reader.cancelled, "something came after the reader left"
        right = right_answer(reader.submit)
        match action.message:
            case Tokens(start=start, tokens=tokens):
                assert start == len(reader.tokens), "a gap or a repetition"
                reader.tokens += [token.token for token in tokens]
                assert tuple(reader.tokens) == right[: len(reader.tokens)], "wrong tokens"
            case Finished(n_tokens=n_tokens):
                assert tuple(reader.tokens) == right, "finished too early"
                assert n_tokens == len(right)
                reader.ended = action.message
            case Resuming():
                self.resumed += 1
            case Failed(reason=reason):
                assert any(words in reason for words in REASONS), f"given up: {reason}"
                reader.ended = action.message
