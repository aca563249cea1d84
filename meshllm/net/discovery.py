"""mDNS: this daemon announced, other daemons seen. zeroconf lives in threads of its own; what it sees crosses to trio.

Service `_meshllm._tcp.local.`, instance name the node id (a second device with the same id is renamed), TXT only id,
protocol version and mesh tag: names and models go over links. Nothing here says that a peer lives: a record of a dead
one lasts for minutes. Adverts are what strangers say: checked, counted, never logged as they came. Interfaces are
followed by polling, since zeroconf notices no change by itself; a change counts once it has stood for two polls (a
flapping one is damped).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence

import trio
import zeroconf

from meshllm.layout.layout import NodeId
from meshllm.net.adverts import SERVICE_TYPE, Announcement, Ignored, Sighting, read_advert, service_info
from meshllm.net.interfaces import (
    Interface,
    announced_addresses,
    choose_interfaces,
    read_interfaces,
)

POLL_S = 5.0  # between looks at the interfaces
MAX_SEEN = 256  # names that are remembered; adverts beyond are ignored
MAX_RESOLVING = 16  # names whose records are being asked for
RESOLVE_MS = 3000
GOODBYE_TIMEOUT_S = 2.0
# what zeroconf raises for a network that fails, or for a loop of its own that is busy or has ended
FAULTS = (TimeoutError, OSError, RuntimeError, zeroconf.Error, zeroconf.EventLoopBlocked)


class _Browser(zeroconf.ServiceListener):
    """Runs in zeroconf's threads; hands sightings over. One lock guards what both its threads touch."""

    def __init__(
        self, read: Callable[[zeroconf.ServiceInfo], Sighting | Ignored], seen: Callable[[Sighting | Ignored], None]
    ) -> None:
        self._read = read
        self._seen = seen
        self._lock = threading.Lock()
        self._names: dict[str, NodeId | None] = {}
        self._resolving = 0

    def add_service(self, zc: zeroconf.Zeroconf, type_: str, name: str) -> None:
        with self._lock:
            if name not in self._names and len(self._names) >= MAX_SEEN:
                return
            self._names.setdefault(name, None)
        try:
            info = zeroconf.ServiceInfo(type_, name)
        except zeroconf.Error:
            self._seen(Ignored("malformed name"))
            return
        if info.load_from_cache(zc):
            self._resolved(name, info)
        else:
            self._resolve(zc, name, info)

    def update_service(self, zc: zeroconf.Zeroconf, type_: str, name: str) -> None:
        self.add_service(zc, type_, name)

    def remove_service(self, zc: zeroconf.Zeroconf, type_: str, name: str) -> None:
        with self._lock:
            node = self._names.pop(name, None)
        if node is not None:
            self._seen(Sighting(node, ()))

    def _resolve(self, zc: zeroconf.Zeroconf, name: str, info: zeroconf.ServiceInfo) -> None:
        """Asks for records that did not come with the advert; never blocks the browser's thread."""
        with self._lock:
            if self._resolving >= MAX_RESOLVING or zc.loop is None:
                return
            self._resolving += 1

        async def ask() -> None:
            try:
                if await info.async_request(zc, RESOLVE_MS):
                    self._resolved(name, info)
            finally:
                with self._lock:
                    self._resolving -= 1

        asyncio.run_coroutine_threadsafe(ask(), zc.loop)

    def _resolved(self, name: str, info: zeroconf.ServiceInfo) -> None:
        sighting = self._read(info)
        if isinstance(sighting, Sighting):
            with self._lock:
                if name in self._names:
                    self._names[name] = sighting.node
        self._seen(sighting)


class Discovery:
    """Announces and browses until cancelled. All zeroconf calls run in worker threads, since they block for seconds."""

    def __init__(
        self,
        own: Announcement,
        patterns: Sequence[str],
        seen: Callable[[Sighting | Ignored], None],
        report: Callable[[str, str], None],
        read: Callable[[], tuple[Interface, ...]] = read_interfaces,
    ) -> None:
        """seen: called in the trio loop. report: event and detail, called in the trio loop at changes."""
        self._own = own
        self._patterns = tuple(patterns)
        self._seen = seen
        self._report = report
        self._read_interfaces = read
        self._chosen: tuple[Interface, ...] = ()
        self._closing = threading.Lock()  # a thread left behind and the one that ends it: only one closes
        self._zeroconf: zeroconf.Zeroconf | None = None
        self._info: zeroconf.ServiceInfo | None = None
        self._stopping = False  # set once: a worker thread that was left behind cleans up after itself

    @property
    def chosen(self) -> tuple[Interface, ...]:
        """The interfaces in use."""
        return self._chosen

    async def run(self) -> None:
        """Follows the interfaces. Errors of the network are reported and tried again; only cancellation ends it."""
        token = trio.lowlevel.current_trio_token()
        pending: tuple[Interface, ...] | None = None
        failing = told = False
        try:
            while True:
                chosen = self._choose()
                if self._patterns and not chosen and not told:
                    told = True
                    self._report("interfaces_failed", f"none is up that fits --interface {', '.join(self._patterns)}")
                if (chosen != self._chosen or failing) and pending in (None, chosen):  # None: the first look
                    failing = not await self._apply(chosen, token)
                pending = chosen
                await trio.sleep(POLL_S)
        finally:
            self._stopping = True
            with trio.move_on_after(GOODBYE_TIMEOUT_S, shield=True):
                await trio.to_thread.run_sync(self._close, abandon_on_cancel=True)

    def _choose(self) -> tuple[Interface, ...]:
        """What is chosen stays where the system does not tell: it takes a socket to ask it, and none may be left."""
        try:
            return choose_interfaces(self._read_interfaces(), self._patterns)
        except OSError:
            return self._chosen

    async def _apply(self, chosen: tuple[Interface, ...], token: trio.lowlevel.TrioToken) -> bool:
        self._chosen = chosen
        names = ", ".join(one.name for one in chosen) or "none"
        try:
            await trio.to_thread.run_sync(self._announce, chosen, token, abandon_on_cancel=True)
        except FAULTS as error:
            self._report("discovery_failed", f"{names}: {error or type(error).__name__}")
            await trio.to_thread.run_sync(self._close, abandon_on_cancel=True)
            return False
        self._report("interfaces_chosen", names)
        return True

    # --- below runs in worker threads: one at a time, but that the last one may close what another still announces ---

    def _announce(self, chosen: tuple[Interface, ...], token: trio.lowlevel.TrioToken) -> None:
        if not chosen:
            self._close()
            return
        on = multicast_targets(chosen)
        info = service_info(self._own, announced_addresses(chosen))
        if self._zeroconf is not None and self._info is not None:
            self._zeroconf.update_interfaces(on)
            info.name = self._info.name  # keep a name that a conflict changed
            self._zeroconf.update_service(info)
            self._info = info
            return
        zc = zeroconf.Zeroconf(interfaces=on, ip_version=zeroconf.IPVersion.All)
        self._zeroconf = zc

        def read(found: zeroconf.ServiceInfo) -> Sighting | Ignored:
            return read_advert(found.port, found.properties, found.parsed_scoped_addresses(), self._own, self._chosen)

        def seen(sighting: Sighting | Ignored) -> None:
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(self._seen, sighting)

        zc.add_service_listener(SERVICE_TYPE, _Browser(read, seen))
        zc.register_service(info, allow_name_change=True)
        self._info = info
        if self._stopping:
            self._close()

    def _close(self) -> None:
        with self._closing:
            zc, self._zeroconf, self._info = self._zeroconf, None, None
        if zc is not None:
            with contextlib.suppress(*FAULTS):  # it says goodbye first, to whoever can hear it
                zc.close()


def multicast_targets(chosen: Sequence[Interface]) -> list[str | int | tuple[tuple[str, int, int], int]]:
    """zeroconf's interfaces: each IPv4 address, and each interface with IPv6 by a link-local address if it has one.

    Loopback takes no IPv6 multicast on Linux ("network is unreachable").
    """
    targets: list[str | int | tuple[tuple[str, int, int], int]] = []
    for one in chosen:
        targets += [text for text in one.addresses if ":" not in text]
        if one.is_loopback:
            continue
        v6 = sorted((text for text in one.addresses if ":" in text), key=lambda text: not text.startswith("fe80"))
        targets += v6[:1]
    return targets
