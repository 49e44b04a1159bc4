"""Hosts on this machine: network namespaces on one switch, each behind a link of known bandwidth.

    host 0   eth0 ===== port0 \\
    host 1   eth0 ===== port1 -+- switch        === a link; `tc tbf` limits what leaves it at both ends
    host 2   eth0 ===== port2 /

Nothing here has a name in the system: a namespace is held by a process that ends when our end of its pipe
closes, and links end with their namespaces. So nothing is left however this process ends, be it by SIGKILL.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

CLONE_NEWNET = 0x40000000  # <linux/sched.h>
SWITCH = "switch"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What every link does, in each direction by itself.

    bits_per_second: of whole Ethernet frames, headers included: of 9014 bytes 8948 are payload of TCP over
        IPv4.
    mtu: of jumbo frames. With 1500 bytes the packets of four hosts keep two cores so busy that they cannot
    fill their links. burst_bytes: what may pass at once after a pause. Long enough for a timer of 250 Hz to
    keep up, short beside what is measured. queue_seconds: what waits longer than this is dropped, as a switch
    would.
    """

    bits_per_second: float = 200e6
    mtu: int = 9000
    burst_bytes: int = 32_000
    queue_seconds: float = 0.05

    @property
    def bytes_per_second(self) -> float:
        """What a formula calls B."""
        return self.bits_per_second / 8


@dataclass(frozen=True)
class Host:
    """One end of the network. holder: the process in its namespace; None: this machine itself, reached over
    loopback."""

    number: int
    holder: int | None = None
    switch: int | None = None

    @property
    def address(self) -> str:
        """Of its link."""
        return "127.0.0.1" if self.holder is None else f"10.77.0.{self.number + 1}"

    @property
    def interface(self) -> str:
        """Its end of the link."""
        return "lo" if self.holder is None else "eth0"

    def enter(self) -> None:
        """Put this process, which may have one thread only, into the host. Raises `OSError`."""
        if self.holder is None:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/proc/{self.holder}/ns/net") as namespace:
            if libc.setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"host {self.number} cannot be entered")

    def counted(self) -> tuple[int, int]:
        """Bytes that have left by its interface, and packets: what its driver has counted since it exists."""
        path = Path("/proc", str(self.holder or "self"), "net/dev")
        fields = (
            next(
                line
                for line in path.read_text().splitlines()
                if line.strip().startswith(f"{self.interface}:")
            )
            .split(":")[1]
            .split()
        )
        return int(fields[8]), int(fields[9])

    def cut(self) -> None:
        """Pull the cable, at the switch."""
        assert self.switch is not None
        _ip(self.switch, f"link set port{self.number} down")

    def mend(self) -> None:
        """Put it back."""
        assert self.switch is not None
        _ip(self.switch, f"link set port{self.number} up")


def why_not() -> str:
    """Why there can be no hosts here; "": there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [name for name in ("ip", "tc", "unshare", "nsenter") if shutil.which(name) is None]:
        return f"{' and '.join(missing)} (iproute2, util-linux) are not installed"
    try:
        with network(1, Shape()):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces with shaped links cannot be made here ({' '.join((getattr(error, 'stderr', '') or str(error)).split())})"


@contextmanager
def network(num_hosts: int, shape: Shape) -> Generator[list[Host]]:
    """That many hosts, numbered from 0, which end with the context. Raises `subprocess.CalledProcessError`
    where one may not."""
    assert 1 <= num_hosts <= 250
    with ExitStack() as stack:
        switch = stack.enter_context(_namespace())
        _ip(
            switch, f"link add {SWITCH} mtu {shape.mtu} type bridge", f"link set {SWITCH} addrgenmode none up"
        )
        hosts = [Host(number, stack.enter_context(_namespace()), switch) for number in range(num_hosts)]
        for host in hosts:
            _connect(host, switch, shape)
        yield hosts


def loopback(num_hosts: int) -> list[Host]:
    """Hosts that are all this machine: no link is shaped, and what one counts of its interface is
    everybody's."""
    return [Host(number) for number in range(num_hosts)]


@contextmanager
def _namespace() -> Generator[int]:
    """The process that holds a new namespace."""
    script = "echo; exec cat"  # says that the namespace is there, ends when its input does
    with subprocess.Popen(
        ["unshare", "--net", "sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as holder:
        assert holder.stdin and holder.stdout and holder.stderr
        try:
            if not holder.stdout.readline():
                raise subprocess.CalledProcessError(
                    holder.wait(), holder.args, stderr=holder.stderr.read().decode()
                )
            yield holder.pid
        finally:
            holder.kill()


def _connect(host: Host, switch: int, shape: Shape) -> None:
    """Plug the host in. No packet is larger than the mtu, so that counters see headers as a wire does, and
    nothing but TCP and ARP is on it."""
    assert host.holder is not None
    port, rate = (
        f"port{host.number}",
        f"tbf rate {shape.bits_per_second:.0f}bit burst {shape.burst_bytes} latency {shape.queue_seconds * 1e3:.0f}ms",
    )
    _ip(
        switch,
        f"link add {port} mtu {shape.mtu} type veth peer name eth0 mtu {shape.mtu} netns {host.holder}",
    )
    for place, device in ((switch, port), (host.holder, "eth0")):
        _ip(place, f"link set {device} addrgenmode none gso_max_segs 1")
        subprocess.run(
            [*within(place), "tc", "qdisc", "add", "dev", device, "root", *rate.split()],
            check=True,
            capture_output=True,
            text=True,
        )
    _ip(switch, f"link set {port} master {SWITCH}", f"link set {port} up")
    _ip(host.holder, f"address add {host.address}/24 dev eth0", "link set eth0 up", "link set lo up")


def _ip(namespace: int, *commands: str) -> None:
    words = [*within(namespace), "ip", "-batch", "-"]
    subprocess.run(words, input="\n".join(commands) + "\n", check=True, capture_output=True, text=True)


def within(namespace: int | None) -> Sequence[str]:
    """Words before a command that is to run where this process is, or here."""
    return [] if namespace is None else ["nsenter", f"--net=/proc/{namespace}/ns/net"]
