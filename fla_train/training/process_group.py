"""The process group of a run's ranks: its store, its timeouts, its network interfaces."""

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address

import psutil
import torch
import torch.distributed as dist

from fla_train.kernels.context_parallel import ContextGroup
from fla_train.utils.ranks import leave_other_launchers

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
LOOPBACK = "127.0.0.1"
STORE_FILE = "FLA_TRAIN_STORE_FILE"  # ranks of one machine share this new file, and nothing listens
# Prefix of the keys in the agents' store, another one for each start: earlier starts have left their keys.
STORE_PREFIX = "FLA_TRAIN_STORE_PREFIX"
TIMEOUT = timedelta(minutes=30)  # for one collective
ANY_PORT = 9  # of a datagram socket that sends nothing


def join(*, on_gpu: bool) -> torch.device:
    """Join the process group of all ranks, unless that has been done; this rank's device.

    RANK, LOCAL_RANK and WORLD_SIZE must be set, with a store: STORE_FILE, or STORE_PREFIX with
    MASTER_ADDR and MASTER_PORT of the agents' store, or what torch's `env://` reads.

    Raises:
        ValueError: MASTER_ADDR is no address.
    """
    leave_other_launchers()  # before DeepSpeed and accelerate look
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return device
    # Gradients are reduced beside kernels that fill the device: NCCL's blocks come first wherever one ends.
    os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    towards = LOOPBACK if alone else os.environ["MASTER_ADDR"]
    if interface := interface_towards(towards):
        for name in (GLOO_INTERFACE, NCCL_INTERFACE):  # a cluster's setting is for several machines
            os.environ[name] = interface if alone else os.environ.get(name) or interface
    store = _store(world)
    place = (
        {"init_method": "env://"} if store is None else {"store": store, "rank": rank, "world_size": world}
    )
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=TIMEOUT, **place)
    return device


@dataclass(frozen=True)
class RankMesh:
    """The ranks of a run as data x context: consecutive ranks share sequences, the others have others.

    Attributes:
        data_rank, data_world: which share of the sequences this rank reads, of how many.
        context: the ranks that share them, each with a part; None: sequences are whole.
    """

    data_rank: int
    data_world: int
    context: ContextGroup | None = None


def split_ranks(context_parallel: int) -> RankMesh:
    """The joined ranks by groups of `context_parallel`, a divisor of their number. All ranks call it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if context_parallel == 1:
        return RankMesh(rank, world)
    group, _ = dist.new_subgroups(context_parallel, timeout=TIMEOUT)
    return RankMesh(rank // context_parallel, world // context_parallel, ContextGroup(group))


def _store(world: int) -> dist.Store | None:
    """Where the ranks meet; None: as torch's environment variables say."""
    if world == 1:
        return dist.HashStore()
    if file := os.environ.get(STORE_FILE):
        return dist.FileStore(file, world)
    if prefix := os.environ.get(STORE_PREFIX):
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return dist.PrefixStore(prefix, dist.TCPStore(host, port, is_master=False, timeout=TIMEOUT))
    return None


def check_address(host: str) -> None:
    """Refuse a name of the main machine that means its loopback there: no other machine reaches it.

    `localhost`, and a number, are taken at their word; and who names gloo's interface needs no other address.

    Raises:
        ValueError: it is such a name, or none.
    """
    if not is_loopback(host) or GLOO_INTERFACE in os.environ:
        return
    with suppress(ValueError):  # no number
        ip_address(host)
        return
    if host != "localhost":
        raise ValueError(
            f"launch.main_process_ip={host} resolves to a loopback address on {socket.gethostname()}: "
            f"give the main machine's address as all machines see it, or set {GLOO_INTERFACE}"
        )


def is_loopback(host: str) -> bool:
    """Whether `host` is reached from this machine alone.

    Raises:
        ValueError: `host` does not resolve.
    """
    own = _own_address(host)
    return own is not None and ip_address(own).is_loopback


def interface_towards(host: str) -> str | None:
    """The network interface from which `host` is reached, such as `eth0`; None if that is unknown.

    Gloo by itself takes the address to which this machine's own name resolves, which other machines may not
    reach, or none if there is no such address.

    Raises:
        ValueError: `host` does not resolve.
    """
    own = _own_address(host)
    owners = (name for name, held in psutil.net_if_addrs().items() if any(a.address == own for a in held))
    return next(owners, None)


def is_own_address(host: str) -> bool:
    """Whether `host` is this machine.

    Raises:
        ValueError: `host` does not resolve.
    """
    own = _own_address(host)
    return own is not None and own in {found[4][0] for found in socket.getaddrinfo(host, ANY_PORT)}


def _own_address(host: str) -> str | None:
    """This machine's address on the way to `host`; None if there is no way: joining says what is wrong.

    Raises:
        ValueError: `host` does not resolve.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # chooses a route; a datagram socket sends nothing yet
            return probe.getsockname()[0]
    except socket.gaierror as error:
        raise ValueError(
            f"launch.main_process_ip={host} is unknown on {socket.gethostname()} ({error.strerror}): "
            "give the main machine's address as all machines see it"
        ) from None
    except OSError:
        return None
