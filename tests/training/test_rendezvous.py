"""Ranks that find each other, and what is said when one does not come."""

import os
import socket
import subprocess
import sys

import pytest
import torch.distributed as dist

from fla_train.training.rendezvous import RanksMissing, _meet, check_address, interface_towards, join


@pytest.fixture
def rank_of(monkeypatch: pytest.MonkeyPatch):
    """`rank_of(rank, world)` makes this process a rank of a run with one rank per machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def become(rank: int, world: int) -> None:
        environment = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
        for key, value in environment.items():
            monkeypatch.setenv(key, str(value))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # restored afterwards
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")

    return become


def test_machines_that_do_not_come_are_named(rank_of):
    rank_of(0, 3)
    with pytest.raises(RanksMissing, match=r"machine 1, 2 did not come to 127\.0\.0\.1:\d+ within 0\.5 s"):
        join("gloo", 0.5)


def test_machine_0_may_be_the_one_that_does_not_come(rank_of):
    rank_of(1, 2)
    with pytest.raises(RanksMissing, match=r"machine 0 did not answer at 127\.0\.0\.1:\d+ within 0\.5 s"):
        join("gloo", 0.5)


def test_ranks_of_another_attempt_are_not_met(rank_of, monkeypatch: pytest.MonkeyPatch):
    """Theirs may live on, behind a network that was cut, with the keys of all their ranks."""
    rank_of(1, 2)
    place = "127.0.0.1", int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*place, is_master=True, wait_for_workers=False)
    for prefix in ("", "before/"):
        for rank in range(2):
            store.set(f"{prefix}rank-{rank}", "here")
    monkeypatch.setenv("FLA_TRAIN_ATTEMPT", "now")
    with pytest.raises(RanksMissing, match="machine 0 did not come to"):
        _meet(*place, rank=1, world=2, timeout=0.5)


MEET = """
import os, torch, torch.distributed as dist
from fla_train.training.rendezvous import join
join("gloo", 60.0)
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total, group=dist.new_group(backend="gloo"))
print(total.item(), os.environ["GLOO_SOCKET_IFNAME"])
"""


def test_all_ranks_meet_on_the_interface_towards_machine_0(rank_of):
    """In the default group, and in another of gloo as checkpoints are written with."""
    ranks = []
    for rank in range(2):
        rank_of(rank, 2)
        command = [sys.executable, "-c", MEET]
        ranks.append(subprocess.Popen(command, env=dict(os.environ), stdout=subprocess.PIPE, text=True))
    assert [rank.communicate()[0].split() for rank in ranks] == [["3", interface_towards("127.0.0.1", 1)]] * 2


def test_a_rank_alone_needs_no_port(rank_of):
    """Another program serves it; both groups work."""
    rank_of(0, 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
        taken.listen()
        done = subprocess.run([sys.executable, "-c", MEET], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == "1"


def test_an_address_that_is_none_is_a_fault_of_the_config():
    with pytest.raises(ValueError, match=r"launch\.main_process_ip=nowhere\.invalid is unknown on "):
        interface_towards("nowhere.invalid", 29500)


def test_a_name_that_means_this_machine_only_is_refused(monkeypatch: pytest.MonkeyPatch):
    """As /etc/hosts of some systems has it. On purpose it may be, as in tests, and who names the interface
    needs no other address."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    found = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 29500))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(ValueError, match=r"main_process_ip=node1 resolves to a loopback address on "):
        check_address("node1", 29500)
    for on_purpose in ("localhost", "127.0.1.1"):
        check_address(on_purpose, 29500)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    check_address("node1", 29500)


@pytest.mark.skipif(sys.platform != "linux", reason="names of Linux's interfaces")
def test_the_interface_is_the_one_towards_the_address():
    assert interface_towards("127.0.0.1", 29500) == "lo"
