"""`fla-bench first_step`: three times, of a process that starts with an empty compile cache."""

import re

from fla_train.cli import bench


def test_first_step(capsys) -> None:
    sizes = ["trainer.seq_len=16", "trainer.micro_batch_size=1", "trainer.global_batch_tokens=16"]
    bench.run(["first_step", "model=gated_delta_product/tiny", "launch.device=cpu", *sizes])
    found = re.findall(r"^(.+): (\d+\.\d) s$", capsys.readouterr().out, re.MULTILINE)
    names = ["imports and the device's start", "first forward and backward", "second forward and backward"]
    assert [name for name, _ in found] == names
    assert float(found[0][1]) > 0
