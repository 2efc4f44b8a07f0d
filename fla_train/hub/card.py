"""Model card (README.md) and training record (training.json) of an exported checkpoint."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from jinja2 import Environment, StrictUndefined
from yaml import YAMLError

from fla_train.hub.checksums import CARD
from fla_train.hub.paths import last_component, run_folder
from fla_train.models.flops import count_parameters
from fla_train.models.settings import DeltaProductSettings
from fla_train.utils.safe_files import find_json, parse_yaml

if TYPE_CHECKING:  # the launcher of a run reads records but imports no models, which take seconds
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TRAINING_FILE = "training.json"  # a CardInfo as JSON
PREFIX = "document_prefix"  # key of an export's config: the token ids before each document, none or one
CHECKPOINT = 'checkpoint = "{}"'  # the line of the card's code that names the repository
USE_HEADING = "## Use\n"  # the heading before which the results of evaluations are inserted
_ENVIRONMENT = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)


@dataclass(frozen=True)
class CardInfo:
    """Facts about the training run, written to README.md and, as JSON, to training.json.

    Attributes:
        name: title of the card, for example the run's name.
        data: short name of the training data, for example `HuggingFaceFW/fineweb sample-100BT`.
        datasets: names of the datasets on the Hub among them.
        tokenizer: name of the tokenizer.
        init_from: name of the initial weights; None: random weights.
        step: optimizer steps done.
        tokens: training tokens seen.
        epochs: passes over the training data; None: unknown, or a stream.
        seq_len: training sequence length in tokens.
        losses: final losses in nats per token by name, for example `{"train": 2.31, "validation": 2.40}`.
        metrics: further results of the last validation by name: perplexity, bits per byte, accuracies.
        recipe: short description of optimizer, learning rate, schedule, batch and precision.
        config: the training config as YAML, without paths and other facts about the machine.
        commit: the commit of the code that trained it.
        hardware: number and name of the devices that trained it.
        date: day of the export, ISO 8601.
    """

    name: str = "delta-product language model"
    data: str | None = None
    datasets: list[str] = field(default_factory=list)
    tokenizer: str | None = None
    init_from: str | None = None
    step: int | None = None
    tokens: int | None = None
    epochs: float | None = None
    seq_len: int | None = None
    losses: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    recipe: str | None = None
    config: str | None = None
    commit: str | None = None
    hardware: str | None = None
    date: str | None = None


def recorded_config(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the training config of a record (fields of `CardInfo`); empty if it has none.

    Raises:
        ValueError: it is not a mapping in YAML.
    """
    text = record.get("config")
    return parse_yaml(text, "the config in training.json") if text else {}


def trained_prefix(record: Mapping[str, Any], tokenizer: "PreTrainedTokenizerBase") -> list[int] | None:
    """Return the tokens before each document in training; None if the record describes no training.

    Documents end with EOS and have no BOS, so this is EOS, or nothing if the data had `append_eos=false`.
    """
    if record.get("config") is None and record.get("seq_len") is None:
        return None
    data = recorded_config(record).get("data") or {}
    has_separator = data.get("append_eos") is not False and tokenizer.eos_token_id is not None
    return [tokenizer.eos_token_id] if has_separator else []


def render_card(
    model: "PreTrainedModel",
    info: CardInfo,
    tokenizer: bool,
    library: tuple[str, str] | None = None,
    plots: Sequence[str] = (),
) -> str:
    """Return README.md of an export.

    Args:
        model: the exported model.
        info: how it was trained.
        tokenizer: whether the export has one; models of synthetic tasks have none.
        library: package and model type that load the export, if they are not those of `model`.
        plots: names of the export's image files.
    """
    config = model.config
    package, model_type = library or (type(model).__module__.split(".")[0], config.model_type)
    mixer = getattr(config, "mixer", None)
    ours = isinstance(config, DeltaProductSettings) and mixer is None
    ours = ours and "linear_attention" in config.layer_types
    remote_code = package == "fla_train" and mixer is None
    count = count_parameters(model)
    template = _ENVIRONMENT.from_string(Path(__file__).with_name("card.md.jinja").read_text())
    return template.render(
        header=_header(info, model_type, ours, mixer),
        info=info,
        config=config,
        count=count,
        settings=_settings(model),
        plots=plots,
        package=package,
        mixer=mixer,
        remote_code=remote_code,
        tokenizer=tokenizer,
        delta_product=ours,
    )


def published_card(
    folder: Path, name: str, origin: Path, *, license: str | None = None, language: str | None = None
) -> str:
    """Return README.md of an exported folder for the repository `name`.

    Its code gets the repository's name, and its header the licence and language. The newest results of
    `fla-eval` on `origin` in its run folder are added to the header's model-index and as a table.

    Raises:
        ValueError: the header is not valid YAML.
    """
    text = (folder / CARD).read_text().replace(CHECKPOINT.format("user/model"), CHECKPOINT.format(name))
    results = list(_results(origin))
    if not (license or language or results):
        return text
    try:
        if header := REGEX_YAML_BLOCK.search(text):
            parse_yaml(header[2], "it")  # ModelCard would expand aliases without limit
        card = ModelCard(text)
    except (YAMLError, ValueError) as error:
        raise ValueError(f"{folder / CARD} has no valid header: {' '.join(str(error).split())}") from error
    data = card.data
    data.license, data.language = license or data.license, language or data.language
    if results:
        data.model_name = data.model_name or name
        data.eval_results = [*(data.eval_results or ()), *results]
        rows = (f"| {r.dataset_name} | {r.metric_type} | {r.metric_value:.4f} |" for r in results)
        table = "\n".join(["| evaluated on | metric | value |", "|---|---|---|", *rows])
        card.text = card.text.replace(USE_HEADING, f"## Evaluation\n\n{table}\n\n{USE_HEADING}", 1)
    return str(card)


def _results(export: Path) -> Iterator[EvalResult]:
    """Yield the newest result of each data set or task, from evaluations that are newer than the export.

    The age of an export is that of its training record, because an edit of the card changes the folder's.
    """
    run = run_folder(export)
    if run is None:  # also for a name on the Hub
        return
    metrics: dict[str, float] = {}
    record = export / TRAINING_FILE
    written = (record if record.is_file() else export).stat().st_mtime
    for file in sorted(run.glob("eval/*/results.json"), key=lambda file: file.stat().st_mtime):
        result = find_json(file) or {}  # a full disk may have cut it short
        evaluated = last_component(result.get("checkpoint", ""))
        if evaluated == last_component(export) and file.stat().st_mtime >= written:
            metrics |= result.get("metrics", {})
    for key, value in metrics.items():
        name, _, metric = key.removeprefix("eval/").rpartition("/")
        if math.isfinite(value):
            yield EvalResult("text-generation", name, name, metric, round(value, 4))


def _header(info: CardInfo, model_type: str, ours: bool, mixer: str | None) -> str:
    """Return the YAML header that the Hub's filters read."""
    data = info.datasets[0] if len(info.datasets) == 1 else info.data or "unnamed"
    losses = {f"{name} loss": value for name, value in info.losses.items() if name != "train"}
    tags = ["fla-train"] if mixer else ["fla-train", model_type.replace("_", "-")]
    about = ("text-generation", data, info.data or data)
    results = [
        EvalResult(*about, name, round(value, 4), dataset_split="validation")
        for name, value in (losses | info.metrics).items()
    ]
    return ModelCardData(
        base_model=info.init_from if "/" in (info.init_from or "") else None,  # a name on the Hub
        datasets=info.datasets or None,
        eval_results=results or None,
        library_name="transformers",
        model_name=info.name,
        pipeline_tag="text-generation",
        tags=["linear-rnn", *tags] if ours else tags,
    ).to_yaml()


def _settings(model: "PreTrainedModel") -> dict[str, object]:
    """Return the settings of the card's first table; None if one does not apply."""
    config = model.config
    layers = Counter(getattr(config, "layer_types", None))
    foreign = not isinstance(config, DeltaProductSettings)  # has only some of these settings
    names = ["mixer", "mixer_options", "hidden_size", "num_hidden_layers", "intermediate_size"]
    names += ["tie_word_embeddings", "norm_after"]
    if foreign or "linear_attention" in layers:
        names += ["num_heads", "head_dim", "state_size"]
    # A custom mixer may ignore these settings, even if it extends our mixer.
    if foreign or (config.mixer is None and "linear_attention" in layers):
        names += ["num_householder", "use_forget_gate", "allow_neg_eigval", "use_output_gate"]
    if foreign or layers.keys() != {"linear_attention"}:
        names += ["num_attention_heads", "num_key_value_heads", "sliding_window", "use_qk_norm"]
    counts = ", ".join(f"{count} {name}" for name, count in layers.items())
    return {"layers": counts or None} | {name: getattr(config, name, None) for name in names}
