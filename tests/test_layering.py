"""The rules that keep the parts apart, read from the source: who may import whom and what.

    vocabulary < stages and leaves < executors < controller < launch < manage < cli, notebook;
    analysis reads run folders and is shown by manage, cli and notebook

A failure here is a question of design: change the code, or change docs/architecture.md and the
tables below with it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# parts whose modules may be imported by everything above
VOCABULARY = {"errors", "types", "run_dir", "placement", "config", "slurm_text"}
VOCABULARY |= {"channels.messages"}
LAYERS = [
    VOCABULARY,
    {"prompts", "generation", "rewards", "batching", "training", "weight_sync"}  # stages
    | {"models", "storage", "observability", "channels"},  # leaves
    {"executors"},
    {"controller"},
    {"launch"},
    {"manage"},
    {"cli", "notebook"},
]
# the few imports that are allowed between parts of one layer
BESIDE = {("generation", "models"), ("training", "models"), ("training", "batching")}
BESIDE |= {("training", "storage"), ("weight_sync", "models"), ("prompts", "models")}
SHOW_ANALYSIS = {"cli", "manage", "notebook"}
ANALYSIS_READS = VOCABULARY | {"storage", "observability"}

# one door per heavy dependency: a module, or a folder (with a dot at the end)
DOORS = {
    "deepspeed": ["llamarl_hpc.training."],
    "h5py": ["llamarl_hpc.storage."],
    "hdf5plugin": ["llamarl_hpc.storage."],
    "zmq": ["llamarl_hpc.channels.zmq."],
    "reasoning_gym": ["llamarl_hpc.prompts.tasks"],
    "math_verify": ["llamarl_hpc.rewards.equality"],
    "submitit": ["llamarl_hpc.launch.slurm"],
    "vllm": ["llamarl_hpc.generation.vllm_engine"],
    "mpi4py": [
        "llamarl_hpc.placement",
        "llamarl_hpc.executors.main",
        "llamarl_hpc.weight_sync.collective.node_window",
    ],
    "omegaconf": ["llamarl_hpc.config.load"],
    "gguf": ["llamarl_hpc.models.gguf"],
    "typer": ["llamarl_hpc.cli."],
    "pandas": ["analysis.", "llamarl_hpc.notebook.run"],  # which names its types only
    "matplotlib": ["analysis."],
    "IPython": ["llamarl_hpc.notebook.views"],
    "tensorboard": ["llamarl_hpc.observability.tensorboard"],
}

# what a login node and the controller load: no torch
TORCH_FREE = ("config", "prompts", "rewards", "batching", "channels", "storage", "observability")
TORCH_FREE += ("controller", "manage", "cli", "notebook")
TORCH_FREE += ("errors", "types", "run_dir", "placement", "slurm_text")


@cache
def sources() -> dict[str, ast.Module]:
    """Module name -> syntax tree, for the package and analysis."""
    found = {}
    for top in ("llamarl_hpc", "analysis"):
        for path in sorted((ROOT / top).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = ast.parse(path.read_text(), str(path))
    return found


@cache
def imports(module: str, *, types_too: bool = True) -> frozenset[str]:
    """Everything `module` imports, at the top or inside functions, as full dotted names."""
    found = set()
    for node in walk(sources()[module], types_too=types_too):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative imports hide which part is meant"
            base = node.module or ""
            names = {f"{base}.{alias.name}" for alias in node.names}
            inner = names & set(sources())
            found |= inner or {base}
    return frozenset(found)


def walk(node: ast.AST, *, types_too: bool) -> Iterator[ast.AST]:
    """All nodes below; without `types_too` not those under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        is_typing = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if types_too or not is_typing:
            yield child
            yield from walk(child, types_too=types_too)


def own(module: str, *, types_too: bool = True) -> frozenset[str]:
    names = imports(module, types_too=types_too)
    return frozenset(name for name in names if name in sources())


def part(module: str) -> str:
    """`llamarl_hpc.channels.codec` -> `channels`; a module of the vocabulary keeps its own name."""
    name = module.removeprefix("llamarl_hpc.")
    return name if name in VOCABULARY else name.split(".")[0]


def layer(name: str) -> int:
    found = [number for number, parts in enumerate(LAYERS) if name in parts]
    assert found, f"'{name}' is in no layer; add it to LAYERS"
    return found[0]


def package_modules() -> list[str]:
    return [name for name in sources() if name.startswith("llamarl_hpc.")]


# ------------------------------------------------------------------ who imports whom


def test_imports_go_downwards_only() -> None:
    wrong = []
    for module in package_modules():
        for target in own(module):
            a, b = part(module), part(target)
            if a == b or target == "llamarl_hpc" or b == "analysis":
                continue
            inside_vocabulary = a in VOCABULARY and b in VOCABULARY
            if layer(b) >= layer(a) and (a, b) not in BESIDE and not inside_vocabulary:
                wrong.append(f"{module} imports {target}")
    assert wrong == []


def test_analysis_reads_run_folders_and_is_shown_above_launch() -> None:
    wrong = []
    for module in sources():
        for target in own(module):
            if module.startswith("analysis"):
                if part(target) not in ANALYSIS_READS | {"analysis"}:
                    wrong.append(f"{module} imports {target}")
            elif target.startswith("analysis") and part(module) not in SHOW_ANALYSIS:
                wrong.append(f"{module} imports {target}")
    assert wrong == []


def test_there_are_no_cycles() -> None:
    graph = {module: own(module, types_too=False) - {module} for module in sources()}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("dependency", DOORS)
def test_a_heavy_dependency_has_one_door(dependency: str) -> None:
    users = [
        module
        for module in sources()
        if any(name.split(".")[0] == dependency for name in imports(module))
    ]
    doors = DOORS[dependency]
    outside = [
        module
        for module in users
        if not any(
            f"{module}.".startswith(door) if door[-1] == "." else module == door for door in doors
        )
    ]
    assert outside == []


def test_the_launchers_environment_is_read_in_one_place() -> None:
    """SLURM_*, OMPI_*, PMI*: only placement and launch read them; the pool takes them away."""
    allowed = {"placement", "launch"}
    readers = {
        module
        for module, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith(("SLURM_", "OMPI_", "PMI_", "PMIX_"))
        and part(module) not in allowed
    }
    assert readers <= {"llamarl_hpc.rewards.pool"}


# ------------------------------------------------------------------ what an import costs


def test_the_controllers_side_never_loads_torch() -> None:
    modules = [name for name in package_modules() if part(name).split(".")[0] in TORCH_FREE]
    assert len(modules) > 40
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: sys.exit(f'{name} loads torch')\n"
        "loaded = {'transformers', 'deepspeed', 'mpi4py', 'sympy', 'pandas'} & set(sys.modules)\n"
        "if loaded: sys.exit(f'loaded: {loaded}')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr


def test_nothing_happens_at_import() -> None:
    """No module-level calls that start something: logging set-up, argument parsing, MPI."""
    forbidden = ("basicConfig", "parse_args", "init_process_group", "signal", "Popen")
    wrong = [
        f"{module}: {ast.unparse(node)}"
        for module, tree in sources().items()
        for statement in tree.body
        if isinstance(statement, ast.Expr)
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in forbidden
    ]
    assert wrong == []
