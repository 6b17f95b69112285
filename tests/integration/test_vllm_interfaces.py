"""Our hooks against vLLM's, of the installed release and of the next one, read from the sources.

What is held, for each: every method of ours that vLLM's base class has too can be called as vLLM's
can; every abstract one is there; everything that we import or read exists.
"""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvferry.integration.vllm.connector import OffloadConnectorBase
from kvferry.integration.vllm.metadata import OrdersMetadata, RankCapacity, ReportsMetadata
from kvferry.integration.vllm.offloading import KVFerryOffloadingConnector
from kvferry.integration.vllm.simple import KVFerrySimpleConnector
from kvferry.integration.vllm.spec import (
    KVFerryOffloadingManager,
    KVFerryOffloadingSpec,
    KVFerryOffloadingWorker,
)
from vllm_sources import (
    NEXT_FOLDER,
    NO_NEXT,
    Hook,
    class_node,
    hooks_of,
    imports_of_vllm,
    installed_folder,
    module_file,
    names_of_class,
    names_of_module,
)

CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base"
OFFLOAD = "vllm.v1.kv_offload.base"

BASES: dict[type, list[tuple[str, str]]] = {
    OffloadConnectorBase: [(CONNECTOR, "KVConnectorBase_V1"), (CONNECTOR, "SupportsHMA")],
    KVFerryOffloadingConnector: [(CONNECTOR, "KVConnectorBase_V1"), (CONNECTOR, "SupportsHMA")],
    KVFerrySimpleConnector: [(CONNECTOR, "KVConnectorBase_V1"), (CONNECTOR, "SupportsHMA")],
    OrdersMetadata: [(CONNECTOR, "KVConnectorMetadata")],
    ReportsMetadata: [(CONNECTOR, "KVConnectorWorkerMetadata")],
    RankCapacity: [(CONNECTOR, "KVConnectorHandshakeMetadata")],
    KVFerryOffloadingSpec: [(OFFLOAD, "OffloadingSpec")],
    KVFerryOffloadingManager: [(OFFLOAD, "OffloadingManager")],
    KVFerryOffloadingWorker: [(OFFLOAD, "OffloadingWorker")],
}

READ = {
    ("vllm.v1.core.sched.output", "SchedulerOutput"): {
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "num_scheduled_tokens",
        "kv_cache_block_copies",
        "kv_connector_block_state",
    },
    ("vllm.v1.core.sched.output", "NewRequestData"): {"req_id", "num_computed_tokens"},
    ("vllm.v1.core.sched.output", "CachedRequestData"): {
        "req_ids",
        "num_computed_tokens",
        "new_block_ids",
    },
    ("vllm.v1.core.kv_cache_manager", "KVCacheBlocks"): {"get_block_ids"},
    ("vllm.v1.request", "Request"): {
        "request_id",
        "block_hashes",
        "num_tokens",
        "num_computed_tokens",
        "skip_reading_prefix_cache",
    },
    ("vllm.v1.outputs", "KVConnectorOutput"): {"kv_connector_worker_meta"},
    ("vllm.v1.kv_cache_interface", "KVCacheConfig"): {
        "num_blocks",
        "kv_cache_groups",
        "kv_cache_tensors",
        "transfer_group_ids",
        "has_mamba_layers",
    },
    ("vllm.v1.kv_cache_interface", "MambaSpec"): {"mamba_cache_mode"},
    ("vllm.v1.core.sched.output", "KVConnectorBlockState"): {
        "get_block_ids",
        "boundary_state_offloads",
    },
    ("vllm.v1.kv_cache_interface", "KVCacheGroupSpec"): {
        "layer_names",
        "kv_cache_spec",
        "host_resident",
    },
    ("vllm.v1.kv_cache_interface", "KVCacheTensor"): {"layers", "block_stride"},
    ("vllm.config.kv_transfer", "KVTransferConfig"): {
        "kv_role",
        "kv_connector_extra_config",
        "kv_load_failure_policy",
    },
    ("vllm.v1.kv_offload.config", "OffloadingConfig"): {
        "worker_kv_bytes_per_block",
        "canonical_layout",
        "parallel",
    },
    ("vllm.v1.kv_offload.base", "GPULoadStoreSpec"): {"group_sizes", "block_indices"},
    ("vllm.v1.kv_offload.base", "CanonicalKVCacheRef"): {"tensor_idx", "page_size_bytes"},
    ("vllm.v1.kv_offload.cpu.common", "CPUOffloadingMetrics"): {
        "CPU_CACHE_USAGE_PERC",
        "CPU_CACHE_WRITE_USAGE_PERC",
        "CPU_CACHE_READ_USAGE_PERC",
        "CPU_ALLOCATION_SIZE",
        "STORES_SKIPPED",
    },
}
"""Fields and methods of vLLM's objects that the code relies on, beyond the hooks' signatures."""


@pytest.fixture(
    params=[
        "installed",
        pytest.param("next", marks=pytest.mark.skipif(not NEXT_FOLDER.exists(), reason=NO_NEXT)),
    ]
)
def sources(request: pytest.FixtureRequest) -> Path:
    return installed_folder() if request.param == "installed" else NEXT_FOLDER


def own_hooks(kind: type) -> Iterator[tuple[str, Any]]:
    """What ``kind`` and its bases in this package define, as they stand in the class body."""
    seen: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.startswith("kvferry."):
            for name, value in vars(base).items():
                if name not in seen:
                    seen.add(name)
                    yield name, value


def kind_of(value: Any) -> str:
    for kind in (classmethod, staticmethod, property):
        if isinstance(value, kind):
            return kind.__name__
    return "method"


def complaints(theirs: Hook, ours: Any) -> Iterator[str]:
    """Why ``ours`` cannot be called wherever ``theirs`` can."""
    if kind_of(ours) != theirs.kind:
        yield f"is a {kind_of(ours)}, vLLM's a {theirs.kind}"
        return
    function = ours.fget if isinstance(ours, property) else getattr(ours, "__func__", ours)
    parameters = list(inspect.signature(function).parameters.values())
    if theirs.kind != "staticmethod":
        parameters = parameters[1:]
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    wanted = theirs.arguments.args
    names = [p.name for p in positional]
    if names[: len(wanted)] != [argument.arg for argument in wanted]:
        yield f"takes {names}, vLLM's {[argument.arg for argument in wanted]}"
        return
    defaults = theirs.arguments.defaults
    for parameter, default in zip(
        positional[len(wanted) - len(defaults) :], defaults, strict=False
    ):
        same = parameter.default is not parameter.empty and (
            not isinstance(default, ast.Constant) or default.value == parameter.default
        )
        if not same:
            yield f"has not vLLM's default {parameter.name}={ast.unparse(default)}"
    for extra in positional[len(wanted) :]:
        if extra.default is extra.empty:
            yield f"wants {extra.name}, which vLLM does not give"
    by_name = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    has_kwargs = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for argument in theirs.arguments.kwonlyargs:
        if argument.arg not in by_name and not has_kwargs:
            yield f"does not take {argument.arg}="
    if theirs.arguments.kwarg is not None and not has_kwargs:
        yield "does not take **kwargs"


@pytest.mark.parametrize("kind", BASES, ids=lambda kind: kind.__name__)
def test_our_hooks_can_be_called_as_vllms(kind: type, sources: Path) -> None:
    ours = dict(own_hooks(kind))
    found = [
        f"{name} {complaint}"
        for module, base in BASES[kind]
        for name, hook in hooks_of(class_node(sources, module, base)).items()
        if name in ours and not name.startswith("__")
        for complaint in complaints(hook, ours[name])
    ]
    assert found == []


@pytest.mark.parametrize("kind", BASES, ids=lambda kind: kind.__name__)
def test_every_abstract_hook_is_there(kind: type, sources: Path) -> None:
    ours = dict(own_hooks(kind))
    missing = [
        name
        for module, base in BASES[kind]
        for name, hook in hooks_of(class_node(sources, module, base)).items()
        if hook.abstract and name not in ours
    ]
    assert missing == []
    assert not inspect.isabstract(kind) or kind is OffloadConnectorBase


def test_the_manager_takes_the_arguments_of_vllms_own(sources: Path) -> None:
    own = hooks_of(class_node(sources, "vllm.v1.kv_offload.cpu.manager", "CPUOffloadingManager"))
    assert list(complaints(own["__init__"], KVFerryOffloadingManager.__init__)) == []


def test_constructors_take_what_vllm_gives(sources: Path) -> None:
    for kind, (module, name) in {
        OffloadConnectorBase: (CONNECTOR, "KVConnectorBase_V1"),
        KVFerryOffloadingSpec: (OFFLOAD, "OffloadingSpec"),
    }.items():
        theirs = hooks_of(class_node(sources, module, name))["__init__"]
        assert list(complaints(theirs, kind.__init__)) == []


def test_everything_that_we_import_is_there(sources: Path) -> None:
    folder = Path(inspect.getfile(OffloadConnectorBase)).parent
    missing = []
    for path in sorted(folder.glob("*.py")):
        for module, name in imports_of_vllm(path):
            source = module_file(sources, module)
            known = source is not None and name in names_of_module(source)
            if not known and module_file(sources, f"{module}.{name}") is None:
                missing.append(f"{path.name}: from {module} import {name}")
    assert missing == []


@pytest.mark.parametrize("where", READ, ids=lambda where: where[1])
def test_everything_that_we_read_is_there(where: tuple[str, str], sources: Path) -> None:
    assert READ[where] - names_of_class(sources, *where) == set()


@pytest.mark.parametrize(
    ("theirs", "complaint"),
    [
        ("def hook(self, a, b): ...", "takes ['a', 'c'], vLLM's ['a', 'b']"),
        ("def hook(self, a, c, d): ...", "takes ['a', 'c'], vLLM's ['a', 'c', 'd']"),
        ("def hook(self, a): ...", "wants c, which vLLM does not give"),
        ("def hook(self, a, c=1): ...", "has not vLLM's default c=1"),
        ("def hook(self, a, c, **more): ...", "does not take **kwargs"),
        ("def hook(self, a, c, *, d): ...", "does not take d="),
        ("@classmethod\n    def hook(cls, a, c): ...", "is a method, vLLM's a classmethod"),
        ("@property\n    def hook(self): ...", "is a method, vLLM's a property"),
        ("def hook(self, a, c): ...", None),
    ],
)
def test_the_comparison_sees_what_differs(theirs: str, complaint: str | None) -> None:
    def ours(self: Any, a: int, c: int) -> None: ...

    node = ast.parse(f"class Base:\n    {theirs}").body[0]
    assert isinstance(node, ast.ClassDef)
    found = list(complaints(hooks_of(node)["hook"], ours))
    assert found == ([complaint] if complaint else [])
