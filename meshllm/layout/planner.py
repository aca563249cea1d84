"""Devices, links and a model -> the layout that answers soonest, or why there is none. A pure function.

It predicts (cost.py) what each set of devices would do with the model split over it (split.py) and takes the best; a
larger set must be better by GAIN, since a rank more is a rank more that can fail. All sets are tried up to EXHAUSTIVE
devices, beyond that the fastest k, and the k with most memory, for each k. Every device left out gets its reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final, Literal

from meshllm.layout.cost import ANSWER, PROMPT, LinkTable, TokenCost, predict
from meshllm.layout.layout import Device, ExchangePrecision, Layout, LinkSpeed, NodeId, Prediction, Share
from meshllm.layout.split import least_bytes, reserved_bytes, split, units_of
from meshllm.model.slicing import ModelShape, Slice

GAIN: Final = 0.03  # of an answer's time, that one rank more must save
SHARED_KV_GAIN: Final = 0.10  # of an answer's time, that cuts inside KV groups must save: they hold KV heads twice
EXHAUSTIVE: Final = 6  # devices: 63 sets, some 20 ms in all
AUTO_CONTEXT: Final = 8192  # positions a slot where none are asked for
LEAST_CONTEXT: Final = 512
_NO_ROOM: Final = "it may use too little memory for a part of this model"


@dataclass(frozen=True, slots=True)
class CannotPlan:
    """Why no layout serves the model: one line that says what is missing."""

    reason: str


@dataclass(frozen=True, slots=True)
class _Candidate:
    devices: tuple[Device, ...]
    slices: tuple[Slice, ...]
    cost: TokenCost


@dataclass(frozen=True, slots=True)
class _Problem:
    shape: ModelShape
    links: LinkTable
    context: int
    slots: int
    exchange: ExchangePrecision
    driver: NodeId | None

    def candidate(self, devices: Sequence[Device]) -> _Candidate | None:
        """The model split over exactly these, or None if it does not fit."""
        best = self._split(devices, shared_kv=False)
        if len(devices) <= self.shape.n_kv_heads:
            return best
        shared = self._split(devices, shared_kv=True)
        if shared is None or (best and shared.cost.answer_s > (1 - SHARED_KV_GAIN) * best.cost.answer_s):
            return best
        return shared

    def _split(self, devices: Sequence[Device], *, shared_kv: bool) -> _Candidate | None:
        speeds = [1 / self._alone_s(device) for device in devices]
        usable = [device.usable_bytes for device in devices]
        slices = split(self.shape, speeds, usable, self.context * self.slots, shared_kv=shared_kv)
        if slices is None:
            return None
        cost = predict(self.shape, devices, slices, self.links, self.exchange, self.driver)
        return _Candidate(tuple(devices), slices, cost)

    def _alone_s(self, device: Device) -> float:
        """Seconds of an answer if this device held everything: its speed for prompts and answers in one number."""
        return predict(self.shape, [device], [self.shape.whole()], self.links, self.exchange).answer_s


def plan(
    devices: Sequence[Device],
    links: Sequence[LinkSpeed],
    shape: ModelShape,
    *,
    mode: Literal["auto", "all"] | int = "auto",
    context: int | None = None,
    slots: int = 4,
    exchange: ExchangePrecision = "q8_0",
    driver: NodeId | None = None,
) -> Layout | CannotPlan:
    """The layout for these devices, or why not.

    mode: "auto" leaves out devices that do not help, "all" uses every one, a number exactly so many. context: positions
    a slot; None for AUTO_CONTEXT, the model's or what memory allows, whichever is least. driver: where steps come from;
    None for any rank. exchange falls back to f16 where the width is no multiple of 32.
    """
    unfit = {device.node: reason for device in devices if (reason := _unfit(device, shape))}
    fit = sorted((d for d in devices if d.node not in unfit), key=lambda d: (-d.read_gbps, d.node))
    if not fit:
        reasons = "; ".join(sorted(set(unfit.values())))
        return CannotPlan("no device can take part" + (reasons and f": {reasons}"))
    if isinstance(mode, int) and len(fit) < mode:
        return CannotPlan(f"the layout wants {mode} devices, {len(fit)} can serve this model: add devices")
    precision: ExchangePrecision = "f16" if exchange == "q8_0" and shape.dim % 32 else exchange
    for positions in _contexts(shape, context):
        problem = _Problem(shape, LinkTable(links), positions, slots, precision, driver)
        best = _best(problem, fit, mode)
        if best is not None:
            left_out = _left_out(problem, fit, best, mode)
            return _layout(problem, best, left_out + tuple(unfit.items()))
    return _too_little_memory(problem, fit)


def _unfit(device: Device, shape: ModelShape) -> str | None:
    """Why a device can take no part whatever the layout."""
    if device.read_gbps <= 0:
        return "its speed is not measured yet"
    return None if device.usable_bytes >= least_bytes(shape) else _NO_ROOM


def _contexts(shape: ModelShape, context: int | None) -> Iterator[int]:
    if context is not None:
        yield min(context, shape.context_length)
        return
    positions = min(AUTO_CONTEXT, shape.context_length)
    yield positions
    while positions // 2 >= LEAST_CONTEXT:
        positions //= 2
        yield positions


def _best(problem: _Problem, devices: Sequence[Device], mode: Literal["auto", "all"] | int) -> _Candidate | None:
    if mode == "all":
        return problem.candidate(devices)
    sizes = range(1, len(devices) + 1) if mode == "auto" else range(mode, mode + 1)
    best: _Candidate | None = None
    for size in sizes:
        found = [candidate for chosen in _sets(devices, size) if (candidate := problem.candidate(chosen))]
        if not found:
            continue
        fastest = min(found, key=lambda candidate: candidate.cost.answer_s)
        if best is None or fastest.cost.answer_s < (1 - GAIN) * best.cost.answer_s:
            best = fastest
    return best


def _sets(devices: Sequence[Device], size: int) -> Iterator[Sequence[Device]]:
    if len(devices) <= EXHAUSTIVE:
        yield from combinations(devices, size)
    else:
        yield devices[:size]
        yield sorted(devices, key=lambda d: (-d.usable_bytes, d.node))[:size]


def _left_out(
    problem: _Problem, devices: Sequence[Device], best: _Candidate, mode: Literal["auto", "all"] | int
) -> tuple[tuple[NodeId, str], ...]:
    reasons: list[tuple[NodeId, str]] = []
    for device in devices:
        if device in best.devices:
            continue
        if mode != "auto":
            reasons.append((device.node, f"the layout is set to {mode} devices, others answer sooner"))
            continue
        members = [other for other in devices if other in best.devices or other is device]
        reasons.append((device.node, _why_not(best, problem.candidate(members))))
    return tuple(reasons)


def _why_not(best: _Candidate, with_it: _Candidate | None) -> str:
    if with_it is None:
        return _NO_ROOM
    with_s, without_s = with_it.cost.answer_s, best.cost.answer_s
    verdict = "would make answers slower" if with_s > without_s else "would make answers hardly faster"
    rates = f"decode {1 / with_it.cost.decode_s:.1f} tokens/s with it, {1 / best.cost.decode_s:.1f} without"
    answer = f"{PROMPT} + {ANSWER} tokens in {with_s:.2f} s with it, {without_s:.2f} s without"
    return f"{verdict}: {answer} ({rates}; predicted)"


def _layout(problem: _Problem, best: _Candidate, left_out: tuple[tuple[NodeId, str], ...]) -> Layout:
    shape, positions = problem.shape, problem.context * problem.slots
    shares = tuple(
        Share(
            node=device.node,
            slice=part,
            slice_bytes=shape.slice_bytes(part),
            cache_bytes=shape.position_bytes(part) * positions,
        )
        for device, part in zip(best.devices, best.slices, strict=True)
    )
    prediction = Prediction(
        decode_tok_s=1 / best.cost.decode_s,
        prefill_tok_s=1 / best.cost.prefill_s,
        wire_bytes_per_token=best.cost.wire_bytes,
    )
    return Layout(
        shares=shares,
        exchange=problem.exchange,
        context=problem.context,
        slots=problem.slots,
        prediction=prediction,
        left_out=left_out,
    )


def _too_little_memory(problem: _Problem, devices: Sequence[Device]) -> CannotPlan:
    reserved = reserved_bytes(problem.shape)
    needed = units_of(problem.shape, problem.context * problem.slots, shared_kv=False).bytes
    usable = sum(max(0, device.usable_bytes - reserved) for device in devices)
    what = f"{problem.slots} x {problem.context} positions of cache"
    missing = f"{_mb(needed - usable)} are missing" if needed > usable else "no cut of it fits the single devices"
    return CannotPlan(
        f"the model with {what} needs {_mb(needed)}, the {len(devices)} devices here may use {_mb(usable)} for it: "
        f"{missing}; add a device, or lower the context or slots"
    )


def _mb(n_bytes: int) -> str:
    return f"{-(-n_bytes // 1_000_000)} MB"
