"""Load exports where only torch, transformers and what they require can be imported; run as a script.

    python bare_environment.py [--auto-class NAME] FOLDER [PACKAGE ...]

FOLDER holds exports and `ids.pt`. Each export gets a file FOLDER/<name>.pt with its logits, generated tokens,
the module of its class, and the logits after `save_pretrained`. With another Auto class than that of language
models it is the module, the outputs for the first row of ids, and a folder FOLDER/saved-<name>. PACKAGES can
be imported, too.
"""

import argparse
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def hide_other_packages(kept: list[str]) -> None:
    """Imports of an installed package fail from now on, unless one of `kept` requires it."""
    needed: set[str] = set()
    waiting = list(kept)
    while waiting:
        name = canonical(waiting.pop())
        if name in needed:
            continue
        needed.add(name)
        try:
            required = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # of another platform
            continue
        waiting += [re.match(r"[\w.-]+", line)[0] for line in required if "extra ==" not in line]
    for module, packages in metadata.packages_distributions().items():
        if not needed & {canonical(name) for name in packages}:
            sys.modules[module] = None
    sys.modules["fla_train"] = None  # of a checkout, which may not be installed


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("packages", nargs="*")
    parser.add_argument("--auto-class", default="AutoModelForCausalLM")
    given = parser.parse_args()
    hide_other_packages(["torch", "transformers", *given.packages])
    import torch

    ids = torch.load(given.folder / "ids.pt")
    exports = sorted(path for path in given.folder.iterdir() if path.is_dir())
    for export in exports:
        if given.auto_class == "AutoModelForCausalLM":
            found = language_model(export, ids)
        else:
            found = other_class(given.auto_class, export, ids[:1])
        torch.save(found, export.with_suffix(".pt"))


def language_model(export: Path, ids: "Tensor") -> dict[str, object]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        AutoModelForCausalLM.from_pretrained(export)
        refusal = None
    except ValueError as error:
        refusal = str(error)
    model = AutoModelForCausalLM.from_pretrained(export, trust_remote_code=True)
    AutoTokenizer.from_pretrained(export, trust_remote_code=True)
    saved = export.parent.parent / f"saved-{export.name}"
    model.save_pretrained(saved)
    again = AutoModelForCausalLM.from_pretrained(saved, trust_remote_code=True)
    with torch.no_grad():
        return {
            "refusal": refusal,
            "module": type(model).__module__,
            "logits": model(ids).logits,
            "logits_again": again(ids).logits,
            "tokens": model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8),
        }


def other_class(auto_class: str, export: Path, ids: "Tensor") -> dict[str, object]:
    import torch
    import transformers

    torch.manual_seed(0)  # for weights of a head that an export of a language model lacks
    model = getattr(transformers, auto_class).from_pretrained(export, trust_remote_code=True)
    model.save_pretrained(export.parent / f"saved-{export.name}")
    with torch.no_grad():
        outputs = model(ids, use_cache=False)
    return {"module": type(model).__module__, "outputs": dict(outputs)}


if __name__ == "__main__":
    main()
