"""A real, slow network on one machine: two network namespaces joined by a rate-limited veth pair.

Needs root, ip and tc.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Sequence
from types import TracebackType

DEVICE = "link0"  # in both namespaces
ADDRESSES = ("10.99.0.1", "10.99.0.2")


def why_not() -> str | None:
    """Return the reason why this machine cannot make a link, in one line; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found (iproute2)"
    return None


class Link:
    """Two namespaces, each with one end of a pair of virtual network cards.

    A context manager: leaving it, for whatever reason, removes the namespaces and with them the cards. Names are
    unique, so that several links can exist at once; all of them use the same addresses. A namespace acts as a machine.
    Its ranks reach each other by its loopback device, because the address is local to them.

    Args:
        rate: bits a second in each direction, in ``tc``'s notation, for example "1gbit".
        burst: the amount of data that passes at full speed after a pause, in ``tc``'s notation.
        ranks_per_machine: how many ranks run in each namespace; they are numbered machine by machine.

    Raises:
        RuntimeError: a command failed. The message has the command's output.
    """

    def __init__(self, rate: str, burst: str = "4mb", ranks_per_machine: int = 1) -> None:
        self.rate, self.burst, self.ranks_per_machine = rate, burst, ranks_per_machine
        name = f"link-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self.namespaces = (f"{name}-a", f"{name}-b")
        self._made: list[str] = []

    def __enter__(self) -> Link:
        try:
            for namespace in self.namespaces:
                self._made.append(namespace)  # first, because an interrupt may come before the next line ends
                _run("ip", "netns", "add", namespace)
            a, b = self.namespaces
            _run(*f"ip link add {DEVICE} netns {a} type veth peer name {DEVICE} netns {b}".split())
            for namespace, address in zip(self.namespaces, ADDRESSES, strict=True):
                inside = ("ip", "netns", "exec", namespace)
                _run(*inside, *f"ip addr add {address}/24 dev {DEVICE}".split())
                _run(*inside, *f"ip link set {DEVICE} up".split())
                _run(*inside, "ip", "link", "set", "lo", "up")
                limit = f"tc qdisc add dev {DEVICE} root tbf rate {self.rate} burst {self.burst} latency 200ms"
                _run(*inside, *limit.split())
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._remove()

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        """Return ``command`` for the namespace of ``rank``. The process that starts becomes the command itself."""
        return ["ip", "netns", "exec", self.namespaces[rank // self.ranks_per_machine], *command]

    def environment(self, rank: int, port: int) -> dict[str, str]:
        """Return a gloo rank's variables: those that torchrun would set on two machines, and the network card."""
        return {
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(2 * self.ranks_per_machine),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % self.ranks_per_machine),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_machine),
            "GLOO_SOCKET_IFNAME": DEVICE,
        }

    def _remove(self) -> None:
        for namespace in self._made:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)
        self._made.clear()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()}")


def sent_bytes(device: str = DEVICE) -> int:
    """Return the bytes that a network card of this namespace has sent: its end of the link, or "lo"."""
    with open(f"/sys/class/net/{device}/statistics/tx_bytes") as file:
        return int(file.read())
