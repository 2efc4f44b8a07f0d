"""Set up the process group of a run's ranks: store, timeouts, network interfaces, groups."""

import os
import socket
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
# Variable with the path of a new file, through which ranks of one machine meet without a port.
STORE_FILE = "FLA_TRAIN_STORE_FILE"
# Variable with the prefix of keys in the agents' store. It is new for each start, because earlier starts have
# left their keys.
STORE_PREFIX = "FLA_TRAIN_STORE_PREFIX"
TIMEOUT = timedelta(minutes=30)  # timeout of one collective
# Port of a datagram socket that sends nothing.
ANY_PORT = 9


class RankMesh:
    """Arrange the joined ranks as data x context: consecutive ranks share sequences. All ranks construct it.

    Attributes:
        data_rank, data_world: index and number of the groups that read different sequences.
        context: the ranks that split each sequence among them; None: sequences are whole.
    """

    def __init__(self, parts: int):
        self.data_rank, self.data_world = dist.get_rank() // parts, dist.get_world_size() // parts
        split = parts > 1
        self.context = ContextGroup(dist.new_subgroups(parts, timeout=TIMEOUT)[0]) if split else None

    def wait(self) -> None:
        """Wait until all ranks call it."""
        dist.barrier()


def join(*, on_gpu: bool) -> torch.device:
    """Join the process group of all ranks, unless already joined, and return this rank's device.

    RANK, LOCAL_RANK and WORLD_SIZE must be set, with a store: STORE_FILE, or STORE_PREFIX with
    MASTER_ADDR and MASTER_PORT of the agents' store, or the variables of torch's `env://`.

    Raises:
        ValueError: MASTER_ADDR is not an address.
    """
    leave_other_launchers()  # before DeepSpeed and accelerate read them
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return device
    # Gradients are reduced while other kernels fill the device. At high priority, NCCL's blocks start first
    # wherever a block ends.
    os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    if interface := interface_towards(LOOPBACK if alone else os.environ["MASTER_ADDR"]):
        # A cluster's setting of the interface counts only for a run on several machines.
        for name in (GLOO_INTERFACE, NCCL_INTERFACE):
            os.environ[name] = interface if alone else os.environ.get(name) or interface
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, timeout=TIMEOUT, store=_store(world), rank=rank, world_size=world)
    return device


def _store(world: int) -> dist.Store | None:
    """Return the store where the ranks meet; None: the one in torch's environment variables."""
    if world == 1:
        return dist.HashStore()
    if file := os.environ.get(STORE_FILE):
        return dist.FileStore(file, world)
    if prefix := os.environ.get(STORE_PREFIX):
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return dist.PrefixStore(prefix, dist.TCPStore(host, port, is_master=False, timeout=TIMEOUT))
    return None


def check_address(host: str) -> None:
    """Check that other machines can reach `host`, the main machine, unless the user names gloo's interface.

    Raises:
        ValueError: `host` does not resolve, or resolves to a loopback address.
    """
    address = _own_address(host)
    if GLOO_INTERFACE not in os.environ and address is not None and ip_address(address).is_loopback:
        raise ValueError(f"launch.main_process_ip={host} is loopback: give another, or set {GLOO_INTERFACE}")


def interface_towards(host: str) -> str | None:
    """Return the network interface from which `host` is reached, such as `eth0`; None: unknown.

    Gloo would use the address to which this machine's name resolves. Other machines may not reach that
    address, or it may not exist.

    Raises:
        ValueError: `host` does not resolve.
    """
    address = _own_address(host)
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, addresses in interfaces if address in {a.address for a in addresses}), None)


def is_own_address(host: str) -> bool:
    """Return whether `host` is this machine.

    Raises:
        ValueError: `host` does not resolve.
    """
    return _own_address(host) in {address[0] for *_, address in socket.getaddrinfo(host, ANY_PORT)}


def _own_address(host: str) -> str | None:
    """Return this machine's address on the route to `host`. None: no route; joining reports the error.

    Raises:
        ValueError: `host` does not resolve.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket chooses a route and sends nothing.
            probe.connect(address)
            return probe.getsockname()[0]
    except socket.gaierror:
        raise ValueError(f"launch.main_process_ip={host} is unknown on {socket.gethostname()}") from None
    except OSError:
        return None
