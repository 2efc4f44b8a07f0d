"""The staging buffer of checkpoints: its segments make up the file that `torch.save` would write."""

import io
import os
from collections import OrderedDict
from collections.abc import Iterator

import pytest
import torch

from fla_train.utils.staging_buffer import StagingBuffer


@pytest.fixture
def buffer() -> Iterator[StagingBuffer]:
    buffer = StagingBuffer()
    yield buffer
    buffer.close()


def load(buffer: StagingBuffer, segments: list, unstaged: bytes) -> object:
    """Return the content of the file that the writer makes of `segments`."""
    buffer.wait()
    parts = [
        os.pread(buffer.descriptor, length, begin) if staged else unstaged[begin : begin + length]
        for staged, begin, length in segments
    ]
    return torch.load(io.BytesIO(b"".join(parts)), weights_only=True)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_kind_of_tensor_comes_back(buffer: StagingBuffer, device: str):
    content = OrderedDict(
        bf16=torch.randn(3, 5).to(torch.bfloat16),
        transposed=torch.randn(4, 6).t(),
        number=torch.tensor(3, dtype=torch.int64),
        flags=torch.tensor([True, False]),
        empty=torch.empty(0, 4),
        large=torch.randn(300_000),
        nested=[(torch.arange(7), "text", None), {"lr": 0.1}],
    )
    content = {
        key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in content.items()
    }
    files, unstaged = buffer.stage({"a": content, "b": {"other": content["large"][1:]}})
    copy = load(buffer, files["a"], unstaged)
    for key, value in content.items():
        if isinstance(value, torch.Tensor):
            assert copy[key].dtype == value.dtype and torch.equal(copy[key], value.cpu()), key
    assert torch.equal(copy["nested"][0][0], torch.arange(7)) and copy["nested"][1] == {"lr": 0.1}
    assert torch.equal(load(buffer, files["b"], unstaged)["other"], content["large"][1:].cpu())
    # Large tensors are in the buffer only, and `bytes` are the file itself.
    assert len(unstaged) < 20_000
    segments, unstaged = buffer.stage({"text": b"as it is"})
    assert unstaged == b"as it is" and segments == {"text": [(False, 0, 8)]}


def test_copies_share_memory_where_the_originals_do_and_are_made_in_place(buffer: StagingBuffer):
    flat = torch.arange(6.0)
    content = {"tied": [flat[:4], flat[:4]], "other": flat[2:]}
    files, unstaged = buffer.stage({"a": content})
    tied = load(buffer, files["a"], unstaged)["tied"]
    assert tied[0].data_ptr() == tied[1].data_ptr() and torch.equal(tied[0], torch.arange(4.0))
    size = os.fstat(buffer.descriptor).st_size
    flat.add_(1.0)
    again, unstaged_again = buffer.stage({"a": content})
    assert again == files and os.fstat(buffer.descriptor).st_size == size
    assert torch.equal(load(buffer, again["a"], unstaged_again)["other"], flat[2:])

    larger = torch.arange(10_000.0)
    files, unstaged = buffer.stage({"a": larger})
    assert torch.equal(load(buffer, files["a"], unstaged), larger)
