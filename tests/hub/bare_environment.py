"""Load exports where only torch, transformers and what they require can be imported; run as a script.

    python bare_environment.py FOLDER [PACKAGE ...]

FOLDER holds exports and `ids.pt`. Each export gets a file FOLDER/<name>.pt with its logits, generated tokens,
the module of its class, and the logits after `save_pretrained`. PACKAGES can be imported, too.
"""

import re
import sys
from importlib import metadata
from pathlib import Path


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
    folder = Path(sys.argv[1])
    hide_other_packages(["torch", "transformers", *sys.argv[2:]])
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = torch.load(folder / "ids.pt")
    for export in sorted(path for path in folder.iterdir() if path.is_dir()):
        try:
            AutoModelForCausalLM.from_pretrained(export)
            refusal = None
        except ValueError as error:
            refusal = str(error)
        model = AutoModelForCausalLM.from_pretrained(export, trust_remote_code=True)
        AutoTokenizer.from_pretrained(export, trust_remote_code=True)
        saved = folder.parent / f"saved-{export.name}"
        model.save_pretrained(saved)
        again = AutoModelForCausalLM.from_pretrained(saved, trust_remote_code=True)
        with torch.no_grad():
            found = {
                "refusal": refusal,
                "module": type(model).__module__,
                "logits": model(ids).logits,
                "logits_again": again(ids).logits,
                "tokens": model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8),
            }
        torch.save(found, export.with_suffix(".pt"))


if __name__ == "__main__":
    main()
