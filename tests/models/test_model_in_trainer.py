"""The models in transformers' Trainer, under PEFT's LoRA and in TRL's fine-tuning."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import ByT5Tokenizer, EvalPrediction, PreTrainedModel, Trainer, TrainingArguments

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


def training(folder: Path, **settings: object) -> dict[str, object]:
    """Settings of one step of plain gradient descent."""
    steps = {"max_steps": 1, "learning_rate": 1.0, "optim": "sgd", "lr_scheduler_type": "constant"}
    output = {"output_dir": str(folder), "logging_steps": 1, "save_strategy": "no", "report_to": []}
    return steps | output | {"max_grad_norm": 0, "use_cpu": True, "disable_tqdm": True} | settings


def flat(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_accumulated_gradients_are_those_of_the_whole_batch(build: Callable, tmp_path: Path) -> None:
    found = []
    for rows, pieces in ((2, 1), (1, 2)):
        sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": pieces}
        arguments = TrainingArguments(**training(tmp_path, **sizes))
        trainer = Trainer(build(), arguments, train_dataset=[row(SIZE), row(4)])
        trainer.train()
        found.append((flat(trainer.model), trainer.state.log_history[0]["loss"]))
    (whole, loss), (pieces, sum_of_losses) = found
    torch.testing.assert_close(pieces, whole, rtol=1e-6, atol=1e-6)
    assert abs(sum_of_losses - loss) < 1e-5


def test_the_trainer_evaluates_and_predicts(build: Callable, tmp_path: Path) -> None:
    """Loss, predictions and a metric of them, alone and between the steps of a training."""
    model, rows = build(), [row(SIZE), row(9), row(4)]
    ids, labels, mask = (
        torch.stack([r[key] for r in rows]) for key in ("input_ids", "labels", "attention_mask")
    )
    logits = model(ids, attention_mask=mask).logits.detach()
    target = labels[:, 1:] != -100
    expected = model.token_losses(ids, mask)[target].mean().item()
    right = (logits[:, :-1].argmax(-1) == labels[:, 1:])[target].double().mean().item()

    def accuracy(prediction: EvalPrediction) -> dict[str, float]:
        real = prediction.label_ids[:, 1:] != -100
        hits = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
        return {"accuracy": hits[real].mean()}

    settings = {"eval_strategy": "steps", "eval_steps": 1, "learning_rate": 0.0}
    arguments = TrainingArguments(**training(tmp_path, **settings))
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, compute_metrics=accuracy)
    trainer.train()
    during = next(entry for entry in trainer.state.log_history if "eval_loss" in entry)
    predicted = trainer.predict(rows)
    for metrics in (during, trainer.evaluate()):
        assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-6)
        assert metrics["eval_accuracy"] == pytest.approx(right)
    torch.testing.assert_close(torch.from_numpy(predicted.predictions), logits)


def test_lora_of_peft_trains_adapters_only(build: Callable, tokens: torch.Tensor, tmp_path: Path):
    targets = ["embeddings", "q_proj", "o_proj", "down_proj", "lm_head"]
    peft = pytest.importorskip("peft")
    model = build("hybrid", embedding_multiplier=3.0).float()
    before = model(tokens).logits.detach()
    old = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=targets, r=2))
    torch.testing.assert_close(adapted(tokens).logits, before)  # adapters begin at zero
    Trainer(adapted, TrainingArguments(**training(tmp_path)), train_dataset=[row(SIZE), row(4)]).train()
    changed = set()
    for name, parameter in adapted.named_parameters():
        name = name.removeprefix("base_model.model.").replace(".base_layer", "").replace("_embedding", "")
        if "lora_B" in name:
            assert parameter.any(), name
            changed.add(name.split(".lora_B")[0].split(".")[-1])
        elif "lora_A" not in name:
            assert torch.equal(parameter, old[name]), name
    assert changed == set(targets)
    after = adapted.eval()(tokens).logits.detach()
    assert (after - before).abs().max() > 1e-3
    torch.testing.assert_close(adapted.merge_and_unload()(tokens).logits, after, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [3, 900])  # so many prompts are not read at once otherwise
@pytest.mark.parametrize("variant", ["gated_delta_product", "hybrid"])
@torch.no_grad()
def test_prompt_tuning_of_peft_generates(build: Callable, tokens: torch.Tensor, variant: str, rows: int):
    peft = pytest.importorskip("peft")
    model, greedy = build(variant), {"do_sample": False, "max_new_tokens": 9, "pad_token_id": 0}
    tokens = tokens.repeat(rows // len(tokens), 1)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    adapted = peft.get_peft_model(model, config).eval()
    embeddings = torch.cat([adapted.get_prompt(len(tokens)).double(), model.model.embeddings(tokens)], dim=1)
    expected = model.generate(inputs_embeds=embeddings, **greedy)
    assert torch.equal(adapted.generate(input_ids=tokens, **greedy)[:, tokens.shape[1] :], expected)


@pytest.mark.parametrize("kind", ["packed", "lora"])
def test_fine_tuning_by_trl(build: Callable, tokens: torch.Tensor, tmp_path: Path, kind: str) -> None:
    """The loss of the first step is the mean over the targets of the documents one by one, packed or not."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    if kind == "lora":
        adapter = pytest.importorskip("peft").LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    model = build(vocab_size=384, pad_token_id=0, eos_token_id=1).float()
    documents = [tokens[0, :8], tokens[1, :5], tokens[2, :13]]
    expected = torch.cat([model.token_losses(document[None])[0] for document in documents]).mean().item()
    settings = {"per_device_train_batch_size": 3, "max_length": 32, "bf16": False}
    settings["packing"] = kind == "packed"
    trainer = trl.SFTTrainer(
        model,
        trl.SFTConfig(**training(tmp_path, **settings)),
        train_dataset=datasets.Dataset.from_dict(
            {"input_ids": [document.tolist() for document in documents]}
        ),
        processing_class=ByT5Tokenizer(),
        peft_config=adapter if kind == "lora" else None,
    )
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-5)
    assert trainer.state.log_history[0]["num_tokens"] == 26
