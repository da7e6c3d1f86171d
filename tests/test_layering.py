"""The architecture, read from the sources: who imports whom, sizes, docstrings."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAPERS = ("gated_lm", "crl_deep", "diffusion_mem")
PACKAGES = ("common", *PAPERS, "experiments")
MAY_IMPORT = {
    "common": {"common"},
    **{paper: {paper, "common"} for paper in PAPERS},
    "experiments": set(PACKAGES),
}
FORBIDDEN = {"pickle", "cPickle", "joblib", "dill", "cloudpickle", "torch", "tensorflow"}
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
# Peers in benchmarks may be timed against PyTorch where it is installed.
PEERS = ROOT / "experiments" / "benchmarks"
# Files that may join, leave or watch the other processes of a run.
DISTRIBUTED = {"mesh.py", "signals.py", "watchdog.py", "checkpoint.py", "workdir.py", "loop.py", "start.py"}


def name_of(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


def tree_of(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.Module) -> set[str]:
    """Dotted names of all imports, also those inside functions; 'from a import b' gives a and a.b."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__")
            and isinstance(node.args[0], ast.Constant)
        ):
            found.add(node.args[0].value)
    return found


def violations(package: str, tree: ast.Module) -> set[str]:
    roots = {name.split(".")[0] for name in imports(tree)}
    return (roots & set(PACKAGES)) - MAY_IMPORT[package] | roots & {"tests"}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_go_from_experiments_to_papers_to_common(path):
    package = path.relative_to(ROOT).parts[0]
    assert not violations(package, tree_of(path))


def test_a_wrong_arrow_is_found():
    for package, code in [
        ("common", "def f():\n    import gated_lm.model"),
        ("crl_deep", "from diffusion_mem import data"),
        ("diffusion_mem", "from experiments.train import run"),
        ("common", "import importlib\nimportlib.import_module('crl_deep.task')"),
    ]:
        assert violations(package, ast.parse(code))
    assert not violations("gated_lm", ast.parse("from common.task import Task\nfrom gated_lm import model"))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_only_the_files_meant_for_it_use_a_library(path):
    tree = tree_of(path)
    roots = {name.split(".")[0] for name in imports(tree)}
    if PEERS not in path.parents:
        assert not roots & FORBIDDEN
    if "orbax" in roots:
        assert name_of(path) == "common/checkpoint.py"
    if re.search(r"\bjax\.distributed\b|\bmultihost_utils\b", ast.unparse(tree)):
        assert path.parent.name == "common"
        assert path.name in DISTRIBUTED
    assert not re.search(r"allow_pickle=True|\.sow\(", ast.unparse(tree))


def public_functions(tree: ast.AST):
    """Functions and methods whose own name and class are public; not those inside functions."""
    for node in ast.iter_child_nodes(tree):
        hidden = getattr(node, "name", "").startswith("_")
        if isinstance(node, ast.If | ast.Try | ast.ClassDef) and not hidden:
            yield from public_functions(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not hidden:
            yield node


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_and_functions_are_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 350
    assert path.name != "utils.py"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 70, node.name


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_public_functions_are_annotated_and_documented(path):
    tree = tree_of(path)
    assert ast.get_docstring(tree), "a file says what it does"
    for node in public_functions(tree):
        assert node.returns is not None, node.name
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        bare = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
        assert not bare, (node.name, bare)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), node.name


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_is_left_to_do(path):
    words = re.findall(r"TODO|FIXME|XXX|NotImplementedError|placeholder", path.read_text(encoding="utf-8"))
    assert not words


def test_the_readme_shows_the_two_commands():
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else "make reproduce, make test"
    assert "make reproduce" in text
    assert "make test" in text


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_of_code_is_a_package_with_a_docstring(package):
    for path in (ROOT / package).rglob("*.py"):
        assert ast.get_docstring(tree_of(path.parent / "__init__.py")), path.parent
