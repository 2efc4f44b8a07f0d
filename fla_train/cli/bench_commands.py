"""The commands of `fla-bench`: each measures what a parsed request asks for, and prints it."""

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from fla_train.cli.app import compose
from fla_train.cli.bench_options import build_parser
from fla_train.cli.overrides import as_written
from fla_train.utils.environment import describe_environment

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def measure(request: argparse.Namespace) -> dict | None:
    """Run the command of a parsed request; what `--json` keeps, None: nothing.

    Raises:
        ValueError: a request that cannot be measured.
    """
    if getattr(request, "threads", None) is not None:
        torch.set_num_threads(request.threads)
    return COMMANDS[request.command](request)


def _kernels(request: argparse.Namespace) -> dict:
    from fla_train.bench.implementations import ours, peers
    from fla_train.bench.kernels import HEADER, bench_shape
    from fla_train.bench.roofline import Shape
    from fla_train.kernels.delta_product import resolve_backend

    device, dtype = _place(request)
    if request.graphs and device.type != "cuda":
        raise ValueError("--graphs needs a GPU: leave it out here")
    if request.heads % request.group:
        raise ValueError(f"--heads {request.heads} is no multiple of --group {request.group}")
    if request.peers and request.group > 1:
        raise ValueError("--peers are timed with as many heads of q and k as of v: leave out --group")
    backends = list(dict.fromkeys(resolve_backend(name, device) for name in request.backends or ["auto"]))
    implementations = ours(backends, request.recompute)
    if request.peers:
        found, missing = peers(device)
        implementations += found
        _report_missing(missing)
    ceilings = _ceilings(request, device, dtype)
    norm = "L2 norm inside" if request.norm else "unit vectors"
    norm += ", CUDA graphs" if request.graphs else ""
    value_dim = request.value_dim or request.head_dim
    shared = f" ({request.group} share q and k)" if request.group > 1 else ""
    print(
        f"B={request.batch} T={request.tokens} H={request.heads}{shared} K={request.head_dim} V={value_dim}, "
        f"{_name(dtype)}, {norm}; {_machine(device)}\n{_line(ceilings)}\n"
    )
    sizes = (request.batch, request.tokens, request.heads, request.head_dim, value_dim)
    gates = [True, False] if request.gate is None else [request.gate]
    kinds = [(n, gated) for n in request.num_householder for gated in gates]
    shapes = [Shape(*sizes, *kind, dtype.itemsize, request.group) for kind in kinds]
    names = ("norm", "rounds", "graphs", "patience")
    options = {name: getattr(request, name) for name in names}
    rows = (
        ({"shape": asdict(shape)}, row)
        for shape in shapes
        for row in bench_shape(shape, implementations, dtype, device, ceilings, **options)
    )
    return _content(request, device, ceilings) | {"rows": _print_rows(HEADER, rows)}


def _decode(request: argparse.Namespace) -> dict:
    from fla_train.bench.decode import HEADER, bench_decode

    defaults = build_parser().parse_args(["decode"])
    of_operator = ("heads", "head_dim", "value_dim", "num_householder", "state_dtype")
    of_model = ("batch", "contexts", "new_tokens", "peers")
    for name in of_model if request.model is None else of_operator:
        if getattr(request, name) != getattr(defaults, name):
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} is for decode {'with' if name in of_model else 'without'} --model")
    device, dtype = _place(request)
    if request.model is not None:
        return _generation(request, device, dtype)
    state_dtype, value_dim = DTYPES[request.state_dtype], request.value_dim or request.head_dim
    print(f"{_name(dtype)}, gate, L2 norm inside; {_machine(device)}\n")
    rows = (
        ({}, bench_decode(heads, request.head_dim, value_dim, num_householder, dtype, state_dtype, device))
        for heads in request.heads
        for num_householder in request.num_householder
    )
    return _content(request, device) | {"rows": _print_rows(HEADER, rows)}


def _generation(request: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> dict:
    from fla_train.bench.generation import GENERATING, HEADER, bench_generation

    names = _model_names(["ours", *request.peers], GENERATING)
    config = _own_config([f"model={request.model}"])
    print(f"{request.model}, {_name(dtype)}; {_machine(device)}\n")
    options = {"tokens": request.new_tokens, "dtype": dtype, "device": device}
    rows = bench_generation(names, config, request.batch, request.contexts, **options)
    return _content(request, device) | {"rows": _print_rows(HEADER, (({}, row) for row in rows))}


def _model_names(names: Sequence[str], known: Sequence[str]) -> Sequence[str]:
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f"--peers {' '.join(unknown)}: choose from {', '.join(sorted(set(known) - {'ours'}))}"
        )
    return names


def _fused_ops(request: argparse.Namespace) -> dict:
    from fla_train.bench.fused_op_cases import FUNCTIONS, Sizes, make_cases
    from fla_train.bench.fused_ops import HEADER, bench_case, ours
    from fla_train.bench.liger import liger

    functions = request.functions or list(FUNCTIONS)
    if unknown := [name for name in functions if name not in FUNCTIONS]:
        raise ValueError(f"--functions {' '.join(unknown)}: choose from {', '.join(FUNCTIONS)}")
    names = ("batch", "tokens", "hidden", "head_dim", "intermediate", "vocabulary", "num_householder")
    defaults = {"head_dim": min(128, request.hidden), "intermediate": request.hidden * 11 // 4}
    sizes = Sizes(*(getattr(request, name) or defaults[name] for name in names))
    if sizes.hidden % sizes.head_dim:
        raise ValueError(f"--hidden {sizes.hidden} is no multiple of --head-dim {sizes.head_dim}")
    if "rotary" in functions and sizes.head_dim % 2:
        raise ValueError(
            f"--head-dim {sizes.head_dim}: rotary needs an even one, or leave it out by --functions"
        )
    device, dtype = _place(request)
    peers, missing = liger(device) if request.peers else ({}, [])
    _report_missing(missing)
    ceilings = _ceilings(request, device, dtype)
    print(f"B={sizes.batch} T={sizes.tokens}, {_name(dtype)}; {_machine(device)}\n{_line(ceilings)}\n")
    rows = (
        ({}, row)
        for case in make_cases(functions, sizes, dtype, device)
        for row in bench_case(
            case,
            [*ours(device), *peers.get(case.function, [])],
            dtype,
            device,
            ceilings,
            rounds=request.rounds,
        )
    )
    return _content(request, device, ceilings) | {"rows": _print_rows(HEADER, rows)}


def _attention(request: argparse.Namespace) -> dict:
    from fla_train.bench.attention import HEADER, bench_attention

    device, dtype = _place(request)
    names = ("heads", "head_dim", "window", "document", "rounds")
    options = {name: getattr(request, name) for name in names}
    options["kv_heads"] = request.kv_heads or request.heads
    print(f"H={request.heads} D={request.head_dim}, {_name(dtype)}; {_machine(device)}\n")
    rows = (({}, row) for row in bench_attention(request.tokens, **options, dtype=dtype, device=device))
    return _content(request, device) | {"rows": _print_rows(HEADER, rows)}


def _train(request: argparse.Namespace) -> dict:
    from fla_train.bench.models import NAMES

    names = _model_names(["ours", *request.peers], NAMES)
    config = _own_config(request.overrides)

    from fla_train.bench.training import bench_models, markdown  # takes seconds: options are checked first
    from fla_train.training.config import resolve_device

    device = torch.device(resolve_device(config))
    ceilings = _ceilings(request, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    print(f"{_machine(device)}\n")
    rows = []
    for row in bench_models(config, names, ceilings, steps=request.steps):
        print(markdown(row), flush=True)
        rows.append(asdict(row))
    return _content(request, device, ceilings) | {"rows": rows}


def _tune(request: argparse.Namespace) -> None:
    from fla_train.bench.roofline import Shape
    from fla_train.bench.tune import HEADER, key_of, tune
    from fla_train.kernels.delta_product import resolve_backend
    from fla_train.kernels.delta_product.select import clear_caches
    from fla_train.kernels.delta_product.triton.launch_table import read_table, user_file, write_table

    device = _device()
    resolve_backend("triton", device)
    dtype, file = DTYPES[request.dtype], request.file or user_file()
    table = read_table(file) if file.is_file() else {}
    print(f"{_machine(device)}; table: {file}\n")
    print("\n".join(HEADER), flush=True)
    for head_dim in request.head_dim:
        value_dim = request.value_dim or head_dim
        for num_householder in request.num_householder:
            sizes = (request.batch, request.tokens, request.heads, head_dim, value_dim, num_householder)
            shape = Shape(*sizes, gated=True, element_size=dtype.itemsize)
            for outcome, options in tune(shape, dtype, device):
                print(outcome.markdown(), flush=True)
                for line in outcome.refused:
                    print(f"refused: {outcome.kernel} {line}", file=sys.stderr)
                table[key_of(shape, device)] = options
            write_table(file, table, describe_environment(str(device)))
            clear_caches()


def _precompile(request: argparse.Namespace) -> None:
    from fla_train.bench.kernel_cache import precompile_run

    if _device().type != "cuda":
        raise ValueError("precompile needs a GPU of the kind that will train: kernels are compiled for it")
    began = time.monotonic()
    kernels = precompile_run(_train_config(request.overrides), request.folder)
    seconds = time.monotonic() - began
    print(f"{kernels} kernels in {request.folder.resolve()}, after {seconds:.0f} s")
    print(f"In a container, with this folder at the same path: TRITON_CACHE_DIR={request.folder.resolve()}")


def _train_config(overrides: Sequence[str]):
    from fla_train.training.config import register, to_config

    register()
    return to_config(compose("train", as_written("train", overrides)))


def _own_config(overrides: Sequence[str]):
    from fla_train.models.build import is_zoo

    config = _train_config(overrides)
    if is_zoo(config.model):
        raise ValueError(
            f"{config.model['model_type']} is another library's model: choose one of ours by model=, and "
            "others by --peers"
        )
    return config


COMMANDS = {
    "kernels": _kernels,
    "decode": _decode,
    "fused_ops": _fused_ops,
    "attention": _attention,
    "train": _train,
    "tune": _tune,
    "precompile": _precompile,
}


def _ceilings(request: argparse.Namespace, device: torch.device, dtype: torch.dtype):
    """The given ones, else the data sheet's, else what this machine reaches."""
    from fla_train.bench.roofline import Ceilings, known_ceilings, measured_ceilings

    given = (request.peak_tflops, request.bandwidth)
    if any(value is not None and not value > 0 for value in given):
        raise ValueError("--peak-tflops and --bandwidth must be positive")
    if all(given):
        return Ceilings(given[0] * 1e12, given[1] * 1e12, "given")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    found = known_ceilings(name, dtype) or measured_ceilings(device, dtype)
    flops, bandwidth = (None if value is None else value * 1e12 for value in given)
    source = f"{found.source}, one given" if any(given) else found.source
    return Ceilings(flops or found.flops, bandwidth or found.bandwidth, source)


def _print_rows(header: Sequence[str], rows: Iterable[tuple[dict, Any]]) -> list[dict]:
    """Print each row of a table as soon as it is measured; the records, each after what goes before it."""
    print("\n".join(header), flush=True)
    records = []
    for before, row in rows:
        print(row.markdown(), flush=True)
        records.append(before | asdict(row))
    return records


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _line(ceilings) -> str:
    speeds = f"{ceilings.flops / 1e12:.3g} TFLOP/s, {ceilings.bandwidth / 1e12:.3g} TB/s"
    return f"Ceilings: {speeds} ({ceilings.source})"


def _report_missing(missing: Sequence[str]) -> None:
    """One line for each peer that is not there."""
    for line in missing:
        print(f"no peer: {line}", file=sys.stderr)


def _device() -> torch.device:
    """A GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _place(request: argparse.Namespace) -> tuple[torch.device, torch.dtype]:
    """The device, and the dtype asked for or usual there."""
    device = _device()
    return device, DTYPES[request.dtype or ("bf16" if device.type == "cuda" else "fp32")]


def _machine(device: torch.device) -> str:
    hardware = f"{torch.get_num_threads()} CPU threads"
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    return f"{hardware}, torch {torch.__version__}"


def _content(request: argparse.Namespace, device: torch.device, ceilings=None) -> dict:
    settings = {name: value for name, value in vars(request).items() if name != "json"}
    content = {
        "environment": describe_environment(str(device)),
        "threads": torch.get_num_threads(),
        "settings": settings,
    }
    return content if ceilings is None else content | {"ceilings": asdict(ceilings)}
