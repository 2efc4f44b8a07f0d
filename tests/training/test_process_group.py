"""Ranks of one machine meet without a port, and addresses that other machines cannot reach are rejected."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fla_train.training.process_group import check_address, interface_towards

MEET = """
import os, psutil, torch, torch.distributed as dist
from fla_train.training.process_group import join
join(on_gpu=False)
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total, group=dist.new_group(backend="gloo"))
listening = {c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}
dist.barrier()
print(total.item(), os.environ.get("GLOO_SOCKET_IFNAME"), *listening)
"""


def test_ranks_of_one_machine_meet_at_a_file_and_listen_on_the_loopback_only(tmp_path: Path):
    """They do so in the default group, and in another one, which checkpoints use."""
    kept = {key: value for key, value in os.environ.items() if not key.endswith("_SOCKET_IFNAME")}
    kept |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "FLA_TRAIN_STORE_FILE": str(tmp_path / "store")}
    command = [sys.executable, "-c", MEET]
    ranks = [
        subprocess.Popen(
            command, env=kept | {"RANK": rank, "LOCAL_RANK": rank}, stdout=subprocess.PIPE, text=True
        )
        for rank in "01"
    ]
    for rank in ranks:
        total, interface, *addresses = rank.communicate(timeout=120)[0].split()
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
