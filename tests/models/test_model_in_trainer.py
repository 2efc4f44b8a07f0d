"""transformers' Trainer: micro-batches with few and with many targets make the step of the whole batch."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import PreTrainedModel, Trainer, TrainingArguments

SIZE = 16


@pytest.fixture(autouse=True)
def no_state_left_behind() -> Iterator[None]:
    """accelerate keeps the choice of the CPU for all that follows in the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def row(targets: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 31, (SIZE,), generator=torch.Generator().manual_seed(targets))
    real = torch.arange(SIZE) < targets
    return {"input_ids": ids, "attention_mask": real.long(), "labels": torch.where(real, ids, -100)}


def step(model: PreTrainedModel, folder: Path, **sizes: int) -> tuple[torch.Tensor, float]:
    """Of one step of plain gradient descent: all parameters after it, and the loss that the Trainer logs."""
    arguments = TrainingArguments(
        str(folder),
        max_steps=1,
        learning_rate=1.0,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **sizes,
    )
    trainer = Trainer(model, arguments, train_dataset=[row(SIZE), row(4)])
    trainer.train()
    parameters = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return parameters, trainer.state.log_history[0]["loss"]


def test_accumulated_gradients_are_those_of_the_whole_batch(build: Callable, tmp_path: Path) -> None:
    sizes = (
        {"per_device_train_batch_size": 2},
        {
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 2,
        },
    )
    (whole, loss), (pieces, sum_of_losses) = (step(build(), tmp_path, **size) for size in sizes)
    torch.testing.assert_close(pieces, whole, rtol=1e-6, atol=1e-6)
    assert abs(sum_of_losses - loss) < 1e-5
