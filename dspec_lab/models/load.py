"""A target, its dtype and its tokenizer by name: the default model, a local folder, or a hub name."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch

from dspec_lab.core.files import read_json
from dspec_lab.kernels.rows import native_status
from dspec_lab.models.decoder import LeanDecoder
from dspec_lab.models.download import Progress
from dspec_lab.models.family import model_spec
from dspec_lab.models.fetch import ensure_smollm2
from dspec_lab.models.hf import HFTarget
from dspec_lab.models.model_folder import MANIFEST, check_folder, weight_dtypes
from dspec_lab.models.protocol import Target

DEFAULT = "smollm2"
DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TargetImpl = Literal["auto", "torch", "native", "hf"]
IMPLS: tuple[TargetImpl, ...] = ("auto", "torch", "native", "hf")
# classes whose checkpoint holds a language model's head; a drafter's or a classifier's is not a target
HEADED = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """A dtype by its short name, and why it was taken."""

    name: str
    dtype: torch.dtype
    why: str


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How a target would be loaded, and why so."""

    kind: Literal["lean", "hf"]
    source: Path | str  # folder or hub name
    why: str


def choose_dtype(text: str, device: torch.device | str = "cpu") -> DtypeChoice:
    """The dtype that `text` (auto, fp32, bf16, fp16) means on `device`.

    "auto" is bf16 on a CPU that has the compiled row ops and on a GPU that knows bf16, else fp32.
    """
    if text in DTYPES:
        return DtypeChoice(text, DTYPES[text], "as asked")
    if text != "auto":
        raise ValueError(f"dtype must be one of auto, {', '.join(DTYPES)}, got {text!r}")
    kind = check_device(device).type
    if kind == "cuda":
        name, why = ("bf16", "the GPU knows it") if torch.cuda.is_bf16_supported() else ("fp32", "the GPU has no bf16")
    elif kind == "cpu":
        compiled, how = native_status()
        name, why = ("bf16", f"row ops {how}") if compiled else ("fp32", f"few bf16 rows are slow in torch, and {how}")
    else:
        name, why = "fp32", f"nothing is known of bf16 on {kind}"
    return DtypeChoice(name, DTYPES[name], why)


def parse_dtype(text: str, device: torch.device | str = "cpu") -> torch.dtype:
    """`choose_dtype(text, device).dtype`."""
    return choose_dtype(text, device).dtype


def dtype_name(dtype: torch.dtype) -> str:
    """fp32, bf16 or fp16; `ValueError` names any other dtype."""
    for name, known in DTYPES.items():
        if dtype == known:
            return name
    raise ValueError(f"dtype {dtype} is not supported; supported are {', '.join(map(str, DTYPES.values()))}")


def check_device(device: torch.device | str) -> torch.device:
    """`device`, if this machine has it."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device {str(device)!r} is not there: {str(error).splitlines()[0]}") from error
    return found


def plan_target(name_or_path: str | Path | None = None, *, impl: TargetImpl = "auto") -> LoadPlan:
    """Which implementation would run `name_or_path`. Reads a folder's config and weight headers, loads nothing.

    None and "smollm2" are the default model, whatever folders there are. An existing folder is read with the lean
    decoder where that knows the model, else with transformers, as everything with impl "hf". Any other name is the
    hub's.
    """
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(IMPLS)}, got {impl!r}")
    source = _locate(name_or_path)
    if source == DEFAULT:
        return LoadPlan("hf" if impl == "hf" else "lean", DEFAULT, "the default model")
    if isinstance(source, Path):
        obstacle = lean_obstacle(_folder_config(source))
    else:
        obstacle = "a hub model runs through transformers"
    if impl == "hf" or (impl == "auto" and obstacle):
        return LoadPlan("hf", source, obstacle or "as asked")
    if obstacle:
        raise ValueError(f"impl {impl!r} is the lean decoder, which cannot run {name_or_path}: {obstacle}")
    return LoadPlan("lean", source, "the lean decoder knows this model")


def load_target(
    name_or_path: str | Path | None = None,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    impl: TargetImpl = "auto",
    *,
    progress: Progress | None = None,
) -> Target:
    """The target that `plan_target` describes. Only safetensors weights are read, and no code of a checkpoint is run.

    Bad input raises `ValueError` or `OSError` with one line that names it.
    """
    place = check_device(device)
    kind = choose_dtype(dtype, place).dtype if isinstance(dtype, str) else DTYPES[dtype_name(dtype)]
    plan = plan_target(name_or_path, impl=impl)
    source = ensure_smollm2(progress=progress) if plan.source == DEFAULT else plan.source
    if plan.kind == "lean":
        return LeanDecoder.from_folder(source, dtype=kind, device=place, impl=impl)  # type: ignore[arg-type]
    return _transformers_target(source, kind, place)


def load_tokenizer(name_or_path: str | Path | None = None, *, progress: Progress | None = None) -> Any:
    """The tokenizer of a model by the names `load_target` takes. One without a chat template fails only on a chat."""
    from transformers import AutoTokenizer

    source = _locate(name_or_path)
    if source == DEFAULT:
        source = ensure_smollm2(progress=progress)
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False, local_files_only=_stay_local(source))
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise OSError(f"cannot load a tokenizer from {source}{_where(source)}: {_first_line(error)}") from error


def lean_obstacle(config: Mapping[str, Any]) -> str | None:
    """Why the lean decoder cannot run a model with this config.json; None where it can."""
    if config.get("quantization_config"):
        return "its weights are quantised"
    try:
        spec = model_spec(config)
    except ValueError as error:
        return str(error)
    if spec.unsupported:
        return f"it has {', '.join(spec.unsupported)}"
    if spec.mlp_bias:
        return "it has mlp_bias"
    if spec.family.name == "qwen3" and config.get("use_sliding_window") and not config.get("layer_types"):
        return "it has a sliding window but no layer_types"
    return None


def _locate(name_or_path: str | Path | None) -> Path | str:
    """`DEFAULT`, an existing folder as a `Path`, or a name for the hub."""
    if name_or_path is None or str(name_or_path) == DEFAULT:
        return DEFAULT
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return folder
    if isinstance(name_or_path, Path) or not HUB_NAME.fullmatch(name_or_path):
        raise FileNotFoundError(f"{name_or_path} is not a folder, and no model of the hub has such a name")
    return name_or_path


def _folder_config(folder: Path) -> Mapping[str, Any]:
    """config.json of a model folder whose weights are safetensors files that can be read."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} holds no config.json")
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise ValueError(f"{folder / 'config.json'} is not a mapping")
    names = [str(name) for name in config.get("architectures") or ()]
    if names and not any(name.endswith(HEADED) for name in names):
        raise ValueError(f"{folder} holds a {names[0]}, which is not a causal language model")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no .safetensors file (pickled weights are not read)")
    for file in files:
        weight_dtypes(file)  # refuses a damaged header, naming the file
    if (folder / MANIFEST).is_file():
        check_folder(folder)
    return config


def _transformers_target(source: Path | str, dtype: torch.dtype, device: torch.device) -> HFTarget:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {} if device.type == "cpu" else {"device_map": {"": device}}
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            local_files_only=_stay_local(source),
            **options,
        )
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        raise OSError(f"cannot load {source}{_where(source)}: {_first_line(error)}") from error
    missing = sorted(info.get("missing_keys", ()))
    if missing:
        raise ValueError(f"{source} lacks {len(missing)} tensors of a {type(model).__name__}, first {missing[0]!r}")
    return HFTarget(model, name=source.name if isinstance(source, Path) else source)


def _stay_local(source: Path | str) -> bool:
    """True where no hub can be reached: then its client need not try again and again before it gives up."""
    if isinstance(source, Path):
        return True
    from huggingface_hub import constants

    if getproxies():
        return False
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, None)
    except OSError:
        return True
    return False


def _where(source: Path | str) -> str:
    return "" if isinstance(source, Path) else ", neither a local folder nor to be had from the hub or its cache"


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
