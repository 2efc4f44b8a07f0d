"""Model card (README.md) and training record (training.json) of an exported checkpoint."""

from dataclasses import dataclass, field

from transformers import PreTrainedModel

from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.flops import count_parameters

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
EXAMPLE = """\
from transformers import AutoModelForCausalLM

checkpoint = "user/model"  # the name on the Hub, or the folder this card lies in
model = AutoModelForCausalLM.from_pretrained(checkpoint{options})
```
"""
NO_CODE = "No remote code is involved."
OWN_MIXER = """\
Its linear layers are the class
`{mixer}`, which is not part of `fla_train`: install the package that holds it."""
# By the package of the class, if it is not transformers: how to get it, and what to import
LIBRARIES = {
    "fla_train": (LOADING, "import fla_train.models\n"),
    "fla": (LOADING_FLA, "import fla.models\n"),
}
GENERATION = """\
```python
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(checkpoint)
inputs = tokenizer("The state of a linear RNN", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))
```
"""
CITATIONS = """\
@inproceedings{siems2025deltaproduct,
  title     = {DeltaProduct: Increasing the Expressivity of DeltaNet Through Products of Householders},
  author    = {Siems, Julien and Carstensen, Timur and Zela, Arber and Hutter, Frank and Pontil, Massimiliano
               and Grazzi, Riccardo},
  year      = {2025},
  note      = {arXiv:2502.10297}
}
@inproceedings{grazzi2025unlocking,
  title     = {Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues},
  author    = {Grazzi, Riccardo and Siems, Julien and Franke, J{\\"o}rg K.H. and Zela, Arber and Hutter, Frank
               and Pontil, Massimiliano},
  year      = {2025},
  note      = {arXiv:2411.12537}
}
@inproceedings{yang2024parallelizing,
  title     = {Parallelizing Linear Transformers with the Delta Rule over Sequence Length},
  author    = {Yang, Songlin and Wang, Bailin and Zhang, Yu and Shen, Yikang and Kim, Yoon},
  year      = {2024},
  note      = {arXiv:2406.06484}
}
@misc{yang2025expressive,
  title     = {Toward More Expressive yet Scalable RNNs: DeltaNet and Its Variants},
  author    = {Yang, Songlin},
  year      = {2025},
  note      = {Slides}
}
"""


TRAINING_FILE = "training.json"  # the CardInfo of an export


@dataclass(frozen=True)
class CardInfo:
    """Facts about the training run, written to README.md and, as JSON, to training.json.

    Attributes:
        name: title of the card, for example the run's name.
        data: the training data in a few words, for example `stdlib` or `HuggingFaceFW/fineweb sample-100BT`.
        tokenizer: the tokenizer's name.
        init_from: the weights it started from; None: random ones.
        step: optimizer steps done.
        tokens: training tokens seen.
        seq_len: training sequence length in tokens.
        losses: final losses in nats per token by name, for example `{"train": 2.31, "validation": 2.40}`.
        config: the training config as YAML, without paths and other facts about the machine.
        commit: the commit of the code that trained it.
    """

    name: str = "delta-product language model"
    data: str | None = None
    tokenizer: str | None = None
    init_from: str | None = None
    step: int | None = None
    tokens: int | None = None
    seq_len: int | None = None
    losses: dict[str, float] = field(default_factory=dict)
    config: str | None = None
    commit: str | None = None


def render_card(
    model: PreTrainedModel, info: CardInfo, tokenizer: bool, library: tuple[str, str] | None = None
) -> str:
    """README.md of an export: front matter, what it is, how it was trained, how to load it, what to cite.

    Args:
        model: what was exported.
        info: how it was trained.
        tokenizer: whether the export has one; models of synthetic tasks have none.
        library: package and model type that load the export, if they are not those of `model`.
    """
    package, model_type = library or (type(model).__module__.split(".")[0], model.config.model_type)
    count, mixer = count_parameters(model), getattr(model.config, "mixer", None)
    how, imports = LIBRARIES.get(package, ("", ""))
    code = NO_CODE if mixer is None else OWN_MIXER.format(mixer=mixer)
    options = "" if mixer is None else f', mixer="{mixer}"'
    parts = [
        _front_matter(model, model_type),
        f"# {info.name}\n",
        f"A language model of type `{model_type}`, trained with `fla_train`.\n",
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
                "optimizer steps": _thousands(info.step),
                "training tokens": _thousands(info.tokens),
                "sequence length": _thousands(info.seq_len),
                **{f"final {name} loss (nats per token)": f"{v:.4f}" for name, v in info.losses.items()},
                "code": info.commit,
            }
        ),
        "## Use\n",
        f"{how.format(code=code)}```python\n{imports}{EXAMPLE.format(options=options)}",
    ]
    if tokenizer:
        parts.append(GENERATION)
    if info.config:
        parts.append(
            f"<details><summary>Training configuration</summary>\n\n```yaml\n{info.config}```\n\n</details>\n"
        )
    if isinstance(model.config, DeltaProductConfig):
        parts.append(f"## Citation\n\n```bibtex\n{CITATIONS}```\n")
    return "\n".join(parts)


def _front_matter(model: PreTrainedModel, model_type: str) -> str:
    ours = ["linear-rnn"] if isinstance(model.config, DeltaProductConfig) else []
    tags = [*ours, "fla-train", model_type.replace("_", "-")]
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation", "tags:"]
    return "\n".join([*lines, *(f"- {tag}" for tag in tags), "---", ""])


def _architecture(model: PreTrainedModel) -> dict[str, object]:
    names = ("hidden_size", "num_hidden_layers", "num_heads", "head_dim", "num_householder")
    if not isinstance(model.config, DeltaProductConfig):
        names += ("num_attention_heads", "num_key_value_heads", "intermediate_size", "state_size")
    flags = ("use_forget_gate", "allow_neg_eigval", "use_output_gate", "tie_word_embeddings")
    return {name: getattr(model.config, name, None) for name in names + flags}


def _table(rows: dict[str, object]) -> str:
    shown = [f"| {name} | {value} |" for name, value in rows.items() if value is not None]
    return "\n".join(["| | |", "|---|---|", *shown, ""]) if shown else "Not recorded.\n"


def _thousands(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"
