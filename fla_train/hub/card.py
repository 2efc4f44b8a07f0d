"""Model card (README.md) and training record (training.json) of an exported checkpoint."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from huggingface_hub import EvalResult, ModelCardData
from transformers import PreTrainedModel

from fla_train.hub.published_card import CHECKPOINT, PLACEHOLDER, USE
from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.flops import count_parameters
from fla_train.models.mixers import DeltaProductMixer

REMOTE_CODE = """\
The repository holds the Python code of the model, so torch and transformers are all it needs:

```sh
pip install torch "transformers>=5.17"
```

transformers runs that code if `trust_remote_code=True` permits it. Where the package `fla_train` is
installed, `import fla_train.models` registers the same class, and no remote code is involved.

"""
LOADING = """\
The model class lives in the package `fla_train`, which is not on PyPI. In a checkout of its source:

```sh
pip install torch==2.13.0 && pip install -c constraints.txt .
```

Importing `fla_train.models` registers the class with the Auto classes. {code}

"""
LOADING_FLA = """\
The model class lives in the package flash-linear-attention (`pip install flash-linear-attention`). Importing
`fla.models` registers it with the Auto classes. No remote code is involved.

"""
EXAMPLE = f"""\
from transformers import AutoModelForCausalLM

{CHECKPOINT.format(PLACEHOLDER)}  # the name on the Hub, or the folder this card lies in
model = AutoModelForCausalLM.from_pretrained(checkpoint{{options}})
```
"""
NO_CODE = "No remote code is involved."
OWN_MIXER = """\
Its linear layers are the class
`{mixer}`, which is not part of `fla_train`: install the package that holds it."""
# By the package of a class without remote code, if it is not transformers: how to get it, what to import
LIBRARIES = {"fla_train": (LOADING, "import fla_train.models\n"), "fla": (LOADING_FLA, "import fla.models\n")}
GENERATION = """\
```python
import torch
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(checkpoint{options})
prompt = tokenizer("The state of a linear RNN", add_special_tokens=False).input_ids
prefix = getattr(model.config, "document_prefix", [])  # in training it stood before each document
ids = torch.tensor([prefix + prompt])
print(tokenizer.decode(model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=50)[0]))
```
"""
# By arXiv identifier; the Hub links a model with the papers whose address its card holds.
CITATIONS = {
    "2406.06484": """\
@inproceedings{yang2024parallelizing,
  title     = {Parallelizing Linear Transformers with the Delta Rule over Sequence Length},
  author    = {Yang, Songlin and Wang, Bailin and Zhang, Yu and Shen, Yikang and Kim, Yoon},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2024},""",
    "2412.06464": """\
@inproceedings{yang2025gated,
  title     = {Gated Delta Networks: Improving Mamba2 with Delta Rule},
  author    = {Yang, Songlin and Kautz, Jan and Hatamizadeh, Ali},
  booktitle = {International Conference on Learning Representations},
  year      = {2025},""",
    "2502.10297": """\
@misc{siems2025deltaproduct,
  title     = {DeltaProduct: Increasing the Expressivity of DeltaNet Through Products of Householders},
  author    = {Siems, Julien and Carstensen, Timur and Zela, Arber and Hutter, Frank and Pontil, Massimiliano
               and Grazzi, Riccardo},
  year      = {2025},""",
    "2411.12537": """\
@inproceedings{grazzi2025unlocking,
  title     = {Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues},
  author    = {Grazzi, Riccardo and Siems, Julien and Franke, J{\\"o}rg K.H. and Zela, Arber and Hutter, Frank
               and Pontil, Massimiliano},
  booktitle = {International Conference on Learning Representations},
  year      = {2025},""",
}


@dataclass(frozen=True)
class CardInfo:
    """Facts about the training run, written to README.md and, as JSON, to training.json.

    Attributes:
        name: title of the card, for example the run's name.
        data: the training data in a few words, for example `stdlib` or `HuggingFaceFW/fineweb sample-100BT`.
        datasets: names on the Hub of those that come from there.
        tokenizer: the tokenizer's name.
        init_from: the weights it started from; None: random ones.
        step: optimizer steps done.
        tokens: training tokens seen.
        seq_len: training sequence length in tokens.
        losses: final losses in nats per token by name, for example `{"train": 2.31, "validation": 2.40}`.
        metrics: further results of the last validation by name: perplexity, bits per byte, accuracies.
        recipe: optimizer, learning rate, schedule, batch and precision in a few words.
        config: the training config as YAML, without paths and other facts about the machine.
        commit: the commit of the code that trained it.
    """

    name: str = "delta-product language model"
    data: str | None = None
    datasets: list[str] = field(default_factory=list)
    tokenizer: str | None = None
    init_from: str | None = None
    step: int | None = None
    tokens: int | None = None
    seq_len: int | None = None
    losses: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    recipe: str | None = None
    config: str | None = None
    commit: str | None = None


def render_card(
    model: PreTrainedModel,
    info: CardInfo,
    tokenizer: bool,
    library: tuple[str, str] | None = None,
    plots: Sequence[str] = (),
) -> str:
    """README.md of an export: front matter, what it is, how it was trained, how to load it, what to cite.

    Args:
        model: what was exported.
        info: how it was trained.
        tokenizer: whether the export has one; models of synthetic tasks have none.
        library: package and model type that load the export, if they are not those of `model`.
        plots: names of the export's image files.
    """
    package, model_type = library or (type(model).__module__.split(".")[0], model.config.model_type)
    count, mixer = count_parameters(model), getattr(model.config, "mixer", None)
    carries_code = package == "fla_train" and mixer is None  # of its class
    how, imports = (REMOTE_CODE, "") if carries_code else LIBRARIES.get(package, ("", ""))
    how = how.format(code=NO_CODE if mixer is None else OWN_MIXER.format(mixer=mixer))
    trust = ", trust_remote_code=True" if carries_code else ""
    options = trust if mixer is None else f', mixer="{mixer}"'
    made = "exported" if info.config is None and info.seq_len is None else "trained"
    parts = [
        f"---\n{_front_matter(model, info, model_type)}\n---\n",
        f"# {info.name}\n",
        f"{_kind(model)}, {made} with `fla_train`.\n",
        _table(
            {
                "parameters": f"{count.total:,}",
                "input and output embedding counted once": f"{count.embedding_once:,}",
                "without embeddings": f"{count.body:,}",
                "vocabulary": f"{model.config.vocab_size:,}",
                **_architecture(model),
            }
        ),
        "## Training\n",
        _table(
            {
                "data": info.data,
                "tokenizer": info.tokenizer,
                "started from the weights of": info.init_from,
                "recipe": info.recipe,
                "optimizer steps": _thousands(info.step),
                "training tokens": _thousands(info.tokens),
                "sequence length": _thousands(info.seq_len),
                **{f"final {name} loss (nats per token)": f"{v:.4f}" for name, v in info.losses.items()},
                **{name: f"{value:.4f}" for name, value in info.metrics.items()},
                "code": info.commit,
            }
        ),
        *(f"![{name}]({name})\n" for name in plots),
        f"{USE}\n{how}```python\n{imports}{EXAMPLE.format(options=options)}",
    ]
    if tokenizer:
        parts.append(GENERATION.format(options=trust))
    if info.config:
        parts.append(
            f"<details><summary>Training configuration</summary>\n\n```yaml\n{info.config}```\n\n</details>\n"
        )
    if _has_delta_product(model):
        parts.append(f"## Citation\n\n```bibtex\n{_citations(model.config)}```\n")
    return "\n".join(parts)


def _kind(model: PreTrainedModel) -> str:
    """Return the kind of model in words, for example "A Gated DeltaProduct language model with n_h = 3"."""
    config = model.config
    if mixer := getattr(config, "mixer", None):
        return f"A language model with the mixer `{mixer}`"
    if not isinstance(config, DeltaProductConfig):
        return f"A language model of type `{config.model_type}`"
    if "linear_attention" not in config.layer_types:
        return "A Transformer language model"
    steps = config.num_householder
    kind = ("Gated " if config.use_forget_gate else "") + ("DeltaProduct" if steps > 1 else "DeltaNet")
    return f"A {kind} language model" + (f" with n_h = {steps}" if steps > 1 else "")


def _has_delta_product(model: PreTrainedModel) -> bool:
    config = model.config
    ours = isinstance(config, DeltaProductConfig) and config.mixer is None
    return ours and "linear_attention" in config.layer_types


def _front_matter(model: PreTrainedModel, info: CardInfo, model_type: str) -> str:
    """What the Hub's filters read. Losses of synthetic tasks and unnamed data are results all the same."""
    ours = ["linear-rnn"] if _has_delta_product(model) else []
    kind = [] if getattr(model.config, "mixer", None) else [model_type.replace("_", "-")]
    data = info.datasets[0] if len(info.datasets) == 1 else info.data or "unnamed"
    measured = {
        f"{name} loss": value for name, value in info.losses.items() if name != "train"
    } | info.metrics
    results = [
        EvalResult("text-generation", data, info.data or data, name, value, dataset_split="validation")
        for name, value in measured.items()
    ]
    return ModelCardData(
        base_model=info.init_from if "/" in (info.init_from or "") else None,  # a name on the Hub
        datasets=info.datasets or None,
        eval_results=results or None,
        library_name="transformers",
        model_name=info.name,
        pipeline_tag="text-generation",
        tags=[*ours, "fla-train", *kind],
    ).to_yaml()


def _citations(config: DeltaProductConfig) -> str:
    """The papers of what the model uses."""
    papers = {
        "2502.10297": config.num_householder > 1,
        "2412.06464": config.use_forget_gate,
        "2411.12537": config.allow_neg_eigval,
        "2406.06484": True,
    }
    link = "  url       = {{https://arxiv.org/abs/{}}}\n}}\n"
    return "".join(f"{CITATIONS[paper]}\n{link.format(paper)}" for paper, used in papers.items() if used)


def _architecture(model: PreTrainedModel) -> dict[str, object]:
    kinds = Counter(getattr(model.config, "layer_types", None))
    others = not isinstance(model.config, DeltaProductConfig)  # which have only some of these
    names = ("mixer", "mixer_options", "hidden_size", "num_hidden_layers", "intermediate_size")
    names += ("tie_word_embeddings",)
    if others or "linear_attention" in kinds:
        names += ("num_heads", "head_dim", "state_size")
    if others or any(isinstance(module, DeltaProductMixer) for module in model.modules()):
        names += ("num_householder", "use_forget_gate", "allow_neg_eigval", "use_output_gate")
    if others or kinds.keys() != {"linear_attention"}:
        names += ("num_attention_heads", "num_key_value_heads", "sliding_window")
    layers = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return {"layers": layers or None} | {name: getattr(model.config, name, None) for name in names}


def _table(rows: dict[str, object]) -> str:
    shown = [f"| {name} | {value} |" for name, value in rows.items() if value is not None]
    return "\n".join(["| | |", "|---|---|", *shown, ""]) if shown else "Not recorded.\n"


def _thousands(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"
