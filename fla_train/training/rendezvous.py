"""How the ranks of a run find each other: at a store that rank 0 serves, within a time limit."""

import os
import socket
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address

import psutil
import torch.distributed as dist

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
STORE_FILE = "FLA_TRAIN_STORE_FILE"  # ranks of one machine may meet at a new file in place of a port
TIMEOUT = timedelta(minutes=30)  # for one operation of the ranks together, once they have met


class RanksMissing(RuntimeError):
    """Not all ranks came; the message is one line for the user."""


def join(backend: str, timeout: float) -> None:
    """Join the process group of all ranks. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be set.

    FLA_TRAIN_ATTEMPT, if it is set, names the attempt: ranks of another one are not met.

    Args:
        backend: `gloo` or `nccl`; gloo groups, of which one writes checkpoints, are made in any case.
        timeout: seconds that this rank waits for the others.

    Raises:
        RanksMissing: naming the machines that did not come.
        ValueError: MASTER_ADDR is no address.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if interface := interface_towards(host, port):
        os.environ.setdefault(GLOO_INTERFACE, interface)
    # Gradients are reduced beside kernels that fill the device: NCCL's blocks come first wherever one ends.
    os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    if world == 1:  # nobody to meet, and no port that another run's start could take first
        store = dist.HashStore()
    elif file := os.environ.get(STORE_FILE):
        store = dist.FileStore(file, world)
    else:
        store = _meet(host, port, rank, world, timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)


def check_address(host: str, port: int) -> None:
    """Refuse a name of machine 0 by which it finds itself on its loopback, where no other machine reaches it.

    `localhost`, and a number, are taken at their word; and who names gloo's interface needs no other address.

    Raises:
        ValueError: it is such a name, or none.
    """
    own = _own_address(host, port)
    if own is None or not ip_address(own).is_loopback or GLOO_INTERFACE in os.environ:
        return
    with suppress(ValueError):  # no number
        ip_address(host)
        return
    if host != "localhost":
        raise ValueError(
            f"launch.main_process_ip={host} resolves to a loopback address on {socket.gethostname()}: "
            f"give machine 0's address as all machines see it, or set {GLOO_INTERFACE}"
        )


def interface_towards(host: str, port: int) -> str | None:
    """The network interface from which `host` is reached, such as `eth0`; None if that can't be told.

    Gloo by itself takes the address to which this machine's own name resolves, which other machines may not
    reach, or none if there is no such address.

    Raises:
        ValueError: `host` does not resolve.
    """
    own = _own_address(host, port)
    owners = (name for name, held in psutil.net_if_addrs().items() if any(a.address == own for a in held))
    return next(owners, None)


def _own_address(host: str, port: int) -> str | None:
    """This machine's address on the way to `host`; None if there is no way: joining says what is wrong.

    Raises:
        ValueError: `host` does not resolve.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # chooses a route; a datagram socket sends nothing yet
            return probe.getsockname()[0]
    except socket.gaierror as error:
        raise ValueError(
            f"launch.main_process_ip={host} is unknown on {socket.gethostname()} ({error.strerror}): "
            "give machine 0's address as all machines see it"
        ) from None
    except OSError:
        return None


def _meet(host: str, port: int, rank: int, world: int, timeout: float) -> dist.Store:
    """The store, once all ranks of this attempt have come to it.

    Its keys begin with the attempt's name: another attempt's rank 0 may still be there, with the keys of all
    its ranks.
    """
    limit = timedelta(seconds=timeout)
    try:
        server = dist.TCPStore(host, port, is_master=rank == 0, timeout=limit, wait_for_workers=False)
    except dist.DistNetworkError as failure:
        if rank == 0:
            raise RanksMissing(f"port {port} can't be served: {failure}") from failure
        raise RanksMissing(f"machine 0 did not answer at {host}:{port} {_within(timeout)}") from failure
    store = dist.PrefixStore(os.environ.get("FLA_TRAIN_ATTEMPT", "alone"), server)
    store.set(f"rank-{rank}", "here")
    names = [f"rank-{other}" for other in range(world)]
    try:
        store.wait(names, limit)
    except dist.DistNetworkError as failure:
        raise RanksMissing(f"machine 0 at {host}:{port} left before all ranks had come") from failure
    except dist.DistStoreError as failure:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        machines = {other // local for other in range(world) if not store.check([names[other]])}
        missing = ", ".join(map(str, sorted(machines)))
        raise RanksMissing(f"machine {missing} did not come to {host}:{port} {_within(timeout)}") from failure
    store.set_timeout(TIMEOUT)
    return dist.PrefixStore("group", store)


def _within(timeout: float) -> str:
    return f"within {timeout:g} s (launch.rendezvous_timeout): see what fla-train says there"
