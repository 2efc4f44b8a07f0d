"""Ranks of one machine meet without a port, and addresses that other machines cannot reach are rejected."""

import os
import socket

import psutil
import pytest
import torch
import torch.distributed as dist

from fla_train.training.process_group import check_address, interface_towards, join
from tests.ranks import fork_ranks


def meet() -> None:
    """Join, add up, and print the sum, the interface and the addresses at which this rank listens."""
    join(on_gpu=False)
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total, group=dist.new_group(backend="gloo"))
    connections = psutil.Process().net_connections("inet")
    listening = {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}
    dist.barrier()
    print(total.item(), os.environ.get("GLOO_SOCKET_IFNAME"), *listening)


def test_ranks_of_one_machine_meet_at_a_file_and_listen_on_the_loopback_only(tmp_path, monkeypatch):
    """They do so in the default group, and in another one, which checkpoints use."""
    for name in [key for key in os.environ if key.endswith("_SOCKET_IFNAME")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FLA_TRAIN_STORE_FILE", str(tmp_path / "store"))
    for code, out, err in fork_ranks(meet, 2, tmp_path):
        assert code == 0, err
        total, interface, *addresses = out.split()
        assert (total, interface) == ("3", interface_towards("127.0.0.1"))
        assert {*addresses} <= {"127.0.0.1", "::1"}


def test_a_loopback_address_is_rejected_unless_the_interface_is_named(monkeypatch: pytest.MonkeyPatch):
    """/etc/hosts of some systems maps the machine's name to 127.0.1.1."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    resolved = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 9))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: resolved)
    with pytest.raises(ValueError, match=r"main_process_ip=node1 "):
        check_address("node1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    check_address("node1")
