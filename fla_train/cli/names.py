"""Error messages for unknown options and keys: close names, and the keys for those of other trainers."""

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from difflib import SequenceMatcher

import yaml
from omegaconf import DictConfig, OmegaConf

from fla_train.cli.config_files import GLOBAL, ConfigFiles
from fla_train.hub.saved_config import flat

# What to write here: what transformers' Trainer, torchtitan, litgpt, flame call it; {} is the value.
# No line is needed for a name that only lacks what stands before our last dot, such as max_steps.
ELSEWHERE = {
    "optimizer.lr={}": "learning_rate max_lr peak_lr base_lr",
    "optimizer.beta1={}": "adam_beta1",
    "optimizer.beta2={}": "adam_beta2",
    "optimizer.eps={}": "adam_epsilon epsilon",
    "optimizer.weight_decay={}": "wd adam_weight_decay",
    "optimizer.max_grad_norm={}": "max_norm grad_clip gradient_clipping gradient_clip_val clip_grad_norm",
    "optimizer=adamw (or muon)": "optim optimizer_name optimizer_type",
    "schedule=cosine (or linear, wsd, constant)": "scheduler lr_scheduler lr_scheduler_type lr_schedule",
    "schedule.warmup_steps=STEPS": "warmup warmup_ratio warmup_iters lr_warmup_steps num_warmup_steps",
    "schedule.min_ratio=RATIO (last learning rate / peak)": "min_lr lr_min min_lr_ratio min_lr_factor",
    "trainer.max_steps={}": "steps train_steps num_steps total_steps max_train_steps max_iters",
    "trainer.max_steps=STEPS (tokens / trainer.global_batch_tokens)": (
        "num_train_epochs num_epochs max_epochs epochs max_tokens total_tokens train_tokens"
    ),
    "trainer.micro_batch_size=SEQUENCES (of a GPU in one pass; a step has trainer.global_batch_tokens)": (
        "batch_size train_batch_size per_device_train_batch_size local_batch_size device_batch_size "
        "micro_batch train_micro_batch_size_per_gpu per_device_eval_batch_size"
    ),
    "trainer.global_batch_tokens=TOKENS (of a step over all GPUs; accumulation follows from it)": (
        "global_batch_size total_batch_size gradient_accumulation_steps grad_accum_steps"
    ),
    "trainer.seq_len={}": (
        "seq_length sequence_length max_seq_len max_seq_length max_length block_size context_length"
    ),
    "trainer.precision=bf16 (or fp32)": "bf16 fp16 mixed_precision mixed_precision_param dtype torch_dtype",
    "trainer.precision=fp8": "fp8 float8 fp8_recipe",
    "trainer.gradient_reduction=bf16 (or fp32)": (
        "reduce_dtype mixed_precision_reduce communication_data_type grad_reduce_in_bf16"
    ),
    "trainer.activation_checkpointing={}": "gradient_checkpointing activation_checkpoint",
    "trainer.activation_checkpointing=selective (or true)": (
        "recompute_granularity activation_checkpoint.mode"
    ),
    "trainer.checkpoint_every={}": "save_steps save_interval save_every checkpoint.interval",
    "trainer.keep_checkpoints={}": "save_total_limit keep_latest_k",
    "trainer.eval_every={}": "eval_steps eval_interval val_check_interval validation.freq",
    "trainer.log_every={}": "logging_steps log_interval log_freq log_every_n_steps",
    "trainer.resume=CHECKPOINT (run.dir alone resumes that run)": "resume_from_checkpoint load_checkpoint",
    "run.dir={}": "output_dir out_dir save_dir log_dir logging_dir dump_folder checkpoint_dir",
    "launch.num_processes={}": "num_gpus n_gpus ngpu gpus devices num_devices nproc_per_node world_size",
    "launch.num_machines={}": "nnodes num_nodes",
    "launch.machine_rank={}": "node_rank",
    "launch.main_process_ip={}": "master_addr",
    "launch.main_process_port={}": "master_port",
    "logger=wandb": "wandb use_wandb enable_wandb report_to",
    "logger.wandb.project={}": "wandb_project",
    "logger.wandb.name={}": "wandb_name wandb_run_name run_name exp_name",
    "logger.tensorboard=true": "enable_tensorboard use_tensorboard",
    "data=local data.path={}": "train_file train_data_dir data_dir data_path",
    "data=hub data.path={}": "dataset dataset_name dataset_path",
    "data.name={}": "dataset_config_name dataset_config",
    "data.tokenizer.name={}": "tokenizer tokenizer_name tokenizer_path tokenizer_name_or_path",
    "model=NAME": "model_name model_config config_name model_type model_name_or_path",
    "model.hidden_size={}": "d_model n_embd dim embed_dim",
    "model.num_hidden_layers={}": "num_layers n_layer n_layers",
    "model.num_heads={}": "n_head n_heads num_attention_heads",
    "model.config.num_attention_heads={}": "n_head n_heads num_heads",
    "model.num_householder={}": "n_h nh n_householder householder",
    "model.allow_neg_eigval={}": "negative_eigenvalues neg_eigval allow_negative_eigenvalues",
    "checkpoint={}": "model pretrained model_path model_name_or_path checkpoint_path",
    "output={}": "output_dir out_dir output_path",
    "max_new_tokens={}": "max_length max_tokens max_gen_toks",
    "hub.repo_id={}": "hub_model_id push_to_hub",
}
CLOSE = 0.75  # least similarity of a suggestion


def option_error(configs: ConfigFiles, group: str, option: str) -> str:
    """What is wrong with `group=option` if there is no such file. Names the closest ones, and all."""
    options = configs.options(group)
    found = [f"{group}={name}" for name in _closest([option], options, _parts_of_option)]
    if not found:  # model=llama: it may be an option of another group
        pairs = ((other, name) for other in configs.defaults for name in configs.options(other))
        found = [f"{other}={name}" for other, name in pairs if option in _parts_of_option(name)]
    names = textwrap.wrap(", ".join(options), 110, break_long_words=False, break_on_hyphens=False)
    listed = "\n    ".join([f"options of {group}:", *names])
    return f"{group}={option}: there is no such option{_did_you_mean(found)}\n    {listed}"


def key_error(configs: ConfigFiles, config: DictConfig, key: str, value: str) -> str | None:
    """Why `key=value` cannot be: the schema of the composed `config` has no such key. None: it has.

    Names keys of ours that mean the same, else the closest ones.
    """
    if _has_key(config, key) or re.match(r"hydra\b", key):
        return None
    if key in configs.defaults:  # keys of an option whose file sets those of the whole config
        return f"the first line of its file must be `{GLOBAL}`, without a byte-order mark before it"
    content = OmegaConf.to_container(config, resolve=False)
    parts = [name.split(".") for name, _ in flat(content)]
    values = {".".join(words) for words in parts} - {key}  # +KEY=VALUE may have put it there
    nodes = {".".join(words[:i]) for words in parts for i in range(1, len(words))}
    parent, _, name = key.rpartition(".")
    if parent == "model" and "source" in config.model:  # another library's
        from fla_train.models.build import class_fields  # seconds

        of_class = class_fields(config.model.source, config.model.model_type)
        values |= {f"model.config.{field}" for field in of_class}
    known = {*values, *nodes, *configs.defaults}
    if error := null_part_error(configs, config, key):
        return error
    if parent in known and is_open(config, parent):
        # Hydra adds an entry to a mapping of typed values in this way only.
        addition = f"write +{parent}={{{name}: {value}}} to add it"
        close = _closest([name], OmegaConf.select(config, parent), lambda entry: [entry])
        if question := _did_you_mean([f"{parent}.{entry}" for entry in close]):
            return f"{parent} has no {name} yet{question} Else {addition}"
        return f"{parent} has no {name} yet: {addition}"
    ours = [text for text, names in ELSEWHERE.items() if {key, name} & set(names.split())]
    ours = [text.replace("{}", value) for text in ours if text.split("=")[0] in known]
    ours += [f"{other}={value}" for other in sorted(values) if other.split(".")[-1] == name]
    if ours:
        return f"there is no key {key}: write {' or '.join(ours[:4])}"
    if close := _closest([key, name], sorted(known), _parts_of_key):
        return f"there is no key {key}{_did_you_mean(close)}"
    return f"there is no key {key}: fla-{configs.config_name} --help lists them"


def null_part_error(configs: ConfigFiles, config: DictConfig, key: str) -> str | None:
    """Which option to choose for `key`: a part of the composed `config` that it names or is below is null.

    None: no part of its path is null, or no option of the group would set it.
    """
    group, *below = key.split(".")
    node, path = OmegaConf.to_container(config, resolve=False).get(group, {}), []
    for name in below:
        if not isinstance(node, dict) or name not in node:
            break
        node, path = node[name], [*path, name]
    if node is not None:
        return None
    options = configs.options(group)
    if path:
        options = [name for name in options if _sets_part(configs.keys(group, name), path)]
    if not options:
        return None
    choice = f"{group}={options[0]}" if len(options) == 1 else f"{group}=NAME, one of {', '.join(options)}"
    return f"no {'.'.join([group, *path])} is chosen: add {choice}"


def is_open(config: DictConfig, key: str) -> bool:
    """Whether `key` is a mapping to which `+` may add entries.

    Another library's model has a fixed set of keys, but no type: recipes may set those of our family.
    """
    typed = OmegaConf.get_type(config) is not dict  # without schemas each mapping is a dict
    return typed and key != "model" and OmegaConf.get_type(OmegaConf.select(config, key)) is dict


def _sets_part(text: str, path: Sequence[str]) -> bool:
    """Whether the YAML text of an option's keys has a mapping at `path`."""
    node = yaml.safe_load(text)
    for name in path:
        node = node.get(name) if isinstance(node, dict) else None
    return isinstance(node, dict)


def flag_error(flag: str, flags: Iterable[str]) -> str:
    """Why `flag` cannot be. Names the closest of `flags`."""
    close = _did_you_mean(_closest([flag], list(flags), lambda name: [name]))
    return f"there is no flag {flag}{close or '; keys are given as KEY=VALUE, without dashes'}"


def _did_you_mean(names: list[str]) -> str:
    """A question to put after an error; empty without names."""
    listed = " or ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
    return f": did you mean {listed}?" if names else ""


def _closest(words: Sequence[str], names: Iterable[str], parts: Callable[[str], list[str]]) -> list[str]:
    """At most six of `names` of which a part is like one of `words`, those most like the first word first."""
    scores = {name: max(_alike(word, part) for word in words for part in parts(name)) for name in names}
    least = max([CLOSE, *(score - 0.1 for score in scores.values())])
    found = [name for name, score in scores.items() if score >= least]
    return sorted(found, key=lambda name: -_alike(words[0], name))[:6]


def _alike(a: str, b: str) -> float:
    """From 0 to 1: equal but for case, "_", "-" and "/". A beginning is close enough."""
    a, b = (re.sub("[_/-]", "", text.lower()) for text in (a, b))
    ratio = SequenceMatcher(None, a, b, autojunk=False).ratio()
    return max(ratio, CLOSE) if len(a) > 2 and b.startswith(a) else ratio


def _parts_of_option(name: str) -> list[str]:
    """delta_net/tiny: itself, delta_net, tiny."""
    return [name, *name.split("/")]


def _parts_of_key(key: str) -> list[str]:
    """logger.wandb.mode: itself, wandb.mode, mode."""
    words = key.split(".")
    return [".".join(words[i:]) for i in range(len(words))]


def _has_key(config: DictConfig, key: str) -> bool:
    """Whether the schema has `key`; where a node has none, whether the node holds it."""
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(config, parent, throw_on_resolution_failure=False) if parent else config
    schema = OmegaConf.get_type(node)
    if is_dataclass(schema):
        return name in {field.name for field in fields(schema)}
    return isinstance(node, DictConfig) and name in node
