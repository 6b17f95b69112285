"""The command line: one table of sub-commands, each imported only when it is asked for.

A sub-command is a function ``main(argv: list[str]) -> int`` somewhere in the package; it parses its
own arguments. Importing it late keeps ``kvferry --help`` free of torch, Triton and vLLM.
"""

import importlib
import sys
from collections.abc import Callable
from typing import Final, NamedTuple, cast

from . import __version__


class SubCommand(NamedTuple):
    """Where a sub-command lives (a module relative to this package) and what it does."""

    module: str
    summary: str


SUB_COMMANDS: Final[dict[str, SubCommand]] = {
    "demo": SubCommand(".demo.command", "serve a real model from the host cache, and check it"),
    "aot": SubCommand(".kernels.aot", "compile every kernel for GPUs that need not be here"),
    "plan": SubCommand(".profiling.plan", "size a model's KV cache, and when loading it pays"),
    "bench": SubCommand(".profiling.bench", "measure transfers, scheduling or serving, and report"),
    "doctor": SubCommand(".profiling.doctor", "check what this machine can do, say what to change"),
    "profile": SubCommand(".profiling.nsight", "profile a command, or one of the kernels"),
}

EXIT_USAGE: Final = 2


def usage() -> str:
    width = max(map(len, SUB_COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in SUB_COMMANDS.items()]
    return "\n".join(
        [
            "usage: kvferry COMMAND [OPTIONS]",
            "       kvferry --version",
            "",
            "commands:",
            *lines,
            "",
            "kvferry COMMAND --help tells a command's options.",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Run one sub-command and return its exit status: 2 for a command line that makes no sense."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] in (["-h"], ["--help"]):
        print(usage())
        return 0
    if arguments[:1] == ["--version"]:
        print(f"kvferry {__version__}")
        return 0
    if not arguments or arguments[0] not in SUB_COMMANDS:
        given = f"unknown command {arguments[0]!r}" if arguments else "no command given"
        print(f"kvferry: {given}; allowed: {', '.join(SUB_COMMANDS)}", file=sys.stderr)
        print(usage(), file=sys.stderr)
        return EXIT_USAGE
    module = importlib.import_module(SUB_COMMANDS[arguments[0]].module, __package__)
    return cast(Callable[[list[str]], int], module.main)(arguments[1:])
