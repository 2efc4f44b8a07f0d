"""How ranks meet: their store, their network interface, and what listens on this machine."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fla_train.training.process_group import check_address, interface_towards
from tests.ranks import free_port

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


def meet(world: int, **environment: str) -> list[list[str]]:
    """What ranks of one machine print: the sum of 1 to `world`, gloo's interface, addresses that listen."""
    kept = {key: value for key, value in os.environ.items() if not key.endswith("_SOCKET_IFNAME")}
    ranks = []
    for rank in range(world):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        full = kept | {"LOCAL_WORLD_SIZE": str(world)} | environment | own
        command = [sys.executable, "-c", MEET]
        ranks.append(subprocess.Popen(command, env=full, stdout=subprocess.PIPE, text=True))
    return [rank.communicate(timeout=120)[0].split() for rank in ranks]


def test_ranks_of_one_machine_meet_at_a_file_and_listen_on_the_loopback_only(tmp_path: Path):
    """In the default group, and in another one of gloo as checkpoints are written with."""
    said = meet(2, FLA_TRAIN_STORE_FILE=str(tmp_path / "store"))
    assert [line[:2] for line in said] == [["3", interface_towards("127.0.0.1")]] * 2
    assert {address for line in said for address in line[2:]} <= {"127.0.0.1", "::1"}


def test_ranks_of_another_launcher_meet_as_torch_says():
    said = meet(2, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    assert [line[0] for line in said] == ["3", "3"]


def test_a_rank_alone_needs_no_store():
    assert meet(1)[0][0] == "1"


def test_an_address_that_is_none_is_an_error_of_the_config():
    with pytest.raises(ValueError, match=r"launch\.main_process_ip=nowhere\.invalid is unknown on "):
        interface_towards("nowhere.invalid")


def test_a_name_that_means_this_machine_only_is_refused(monkeypatch: pytest.MonkeyPatch):
    """As /etc/hosts of some systems has it. On purpose it may be, as in tests, and who names the interface
    needs no other address."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    found = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 9))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(ValueError, match=r"main_process_ip=node1 resolves to a loopback address on "):
        check_address("node1")
    for on_purpose in ("localhost", "127.0.1.1"):
        check_address(on_purpose)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    check_address("node1")


@pytest.mark.skipif(sys.platform != "linux", reason="names of Linux's interfaces")
def test_the_interface_is_the_one_towards_the_address():
    assert interface_towards("127.0.0.1") == "lo"
