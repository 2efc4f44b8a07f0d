"""Load exports where only torch, transformers and their requirements can be imported; run as a script.

    python bare_environment.py FOLDER [PACKAGE ...]

FOLDER contains exports and `ids.pt`. Each export gets a file FOLDER/<name>.pt with the module of its language
model class, and the outputs of the model before and after `save_pretrained`. The first export also gets those
of the other classes in its `auto_map`. PACKAGES can be imported as well.
"""

import gc
import json
import re
import sys
from importlib import metadata
from pathlib import Path


def hide_other_packages(kept: list[str]) -> None:
    """Make imports of installed packages fail, unless one of `kept` requires them."""
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


def main(folder: Path, *packages: str) -> None:
    hide_other_packages(["torch", "transformers", *packages])
    gc.disable()  # which makes imports a quarter faster
    import torch
    import transformers

    ids = torch.load(folder / "ids.pt")
    exports = sorted(path for path in folder.iterdir() if path.is_dir())
    for export in exports:
        try:
            transformers.AutoModelForCausalLM.from_pretrained(export)
            results = {"error": None}
        except ValueError as error:
            results = {"error": str(error)}
        transformers.AutoTokenizer.from_pretrained(export, trust_remote_code=True)
        classes = json.loads((export / "config.json").read_text())["auto_map"].keys() - {"AutoConfig"}
        for name in classes if export is exports[0] and not packages else ["AutoModelForCausalLM"]:
            torch.manual_seed(0)  # for the weights of a head that an export of a language model lacks
            auto_class = getattr(transformers, name)
            model = auto_class.from_pretrained(export, trust_remote_code=True)
            saved = folder.parent / "saved" / f"{name}-{export.name}"
            model.save_pretrained(saved)
            again = auto_class.from_pretrained(saved, trust_remote_code=True)
            with torch.no_grad():
                outputs = [dict(m(ids[:1], use_cache=False)) for m in (model, again)]
            results[name] = {"module": type(model).__module__, "outputs": outputs}
            if name == "AutoModelForCausalLM":
                mask = torch.ones_like(ids)
                results["tokens"] = model.generate(ids, attention_mask=mask, max_new_tokens=8)
        torch.save(results, export.with_suffix(".pt"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
