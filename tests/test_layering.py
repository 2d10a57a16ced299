"""Layers of imports, lengths of files, and meanings of names."""

import ast
import graphlib
import importlib
import pathlib
import re
import sys
import tomllib
import types
from collections.abc import Iterator

_ROOT = pathlib.Path(__file__).resolve().parents[1]

# Highest first. A file imports from its own layer and from lower ones; two
# layers on one line know nothing of each other.
_LAYERS = (
  ("jaxkv.__main__", "jaxkv.integrations"),
  ("jaxkv._src.commands", "jaxkv._src.integrations"),
  ("jaxkv",),  # jaxkv/__init__.py, through which clients see the verbs
  (
    "jaxkv.checkpoint",
    "jaxkv.guides",
    "jaxkv.host",
    "jaxkv.kernels",
    "jaxkv.kv",
    "jaxkv.models",
    "jaxkv.results",
    "jaxkv.rl",
    "jaxkv.rollout",
    "jaxkv.sharding",
    "jaxkv.workers",
  ),
  ("jaxkv._src.workers",),
  ("jaxkv._src.service",),
  ("jaxkv._src.sharding",),
  ("jaxkv._src.transfer",),
  (
    "jaxkv._src.engine",
    "jaxkv._src.host",
    "jaxkv._src.models",
    "jaxkv._src.rl",
  ),
  ("jaxkv._src.guides", "jaxkv._src.kv", "jaxkv._src.sampling"),
  ("jaxkv._src.exact", "jaxkv._src.show"),
  ("jaxkv._src.cache",),
  (
    "jaxkv._src.arrays",
    "jaxkv._src.compilation_cache",
    "jaxkv._src.extras",
    "jaxkv._src",
  ),
  ("jaxkv_kernels",),
)
_RANK = {layer: rank for rank, row in enumerate(_LAYERS) for layer in row}

_CACHE_PACKAGE = "jaxkv._src.cache"
# They use the library as anybody does: by its public names.
_CLIENTS = ("jaxkv._src.commands", "jaxkv._src.integrations")
# Folders of files, and packages that extras install; nothing of the cache.
_OPEN_TO_CLIENTS = {
  "jaxkv._src.arrays.digest",
  "jaxkv._src.arrays.no_mesh",
  "jaxkv._src.compilation_cache",
  "jaxkv._src.extras",
}
# Modules of `_src` that are not in a package.
_LOOSE = {"compilation_cache", "extras", "show"}

# Inside the cache, likewise; of `invariants`, only `jaxkv` knows.
_CACHE_LAYERS = (
  ("verbs", "invariants"),
  ("steps",),
  ("state",),
  ("pool",),
  ("prefix",),
  ("pool_sizes",),
  ("config",),
  ("group_kinds",),
  ("describe",),
)
# The cache's other imports, beside the standard library and itself.
_CACHE_IMPORTS = {"chex", "jax", "numpy"}
_ARRAYS_PACKAGE = "jaxkv._src.arrays"

_MAX_FILE = 500
_NAMELESS = {"helpers.py", "misc.py", "util.py", "utils.py", "common.py"}


def _files(*folders: str) -> list[pathlib.Path]:
  return sorted(p for f in folders for p in (_ROOT / f).rglob("*.py"))


def _module(path: pathlib.Path) -> str:
  parts = path.relative_to(_ROOT).with_suffix("").parts
  parts = parts[1:] if parts[0] == "kernels" else parts
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


_PACKAGES = {_module(path): path for path in _files("jaxkv", "kernels")}
_ALL_FILES = _files("jaxkv", "kernels", "tests", "benchmarks")
_TREES = {path: ast.parse(path.read_text("utf-8")) for path in _ALL_FILES}


def _imports(module: str) -> Iterator[str]:
  """Every module that one imports, wherever in the file it does so."""
  path = _PACKAGES[module]
  package = module if path.name == "__init__.py" else module.rpartition(".")[0]
  for node in ast.walk(_TREES[path]):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      yield from _from(node, package)


def _from(node: ast.ImportFrom, package: str) -> Iterator[str]:
  """`from a import b` means module a.b where there is one, else module a."""
  source = node.module or ""
  if node.level:
    parents = package.split(".")[: len(package.split(".")) + 1 - node.level]
    source = ".".join([*parents, *source.split(".")]).strip(".")
  for alias in node.names:
    inner = f"{source}.{alias.name}"
    yield inner if inner in _PACKAGES else source


def _layer(module: str) -> str | None:
  """The layer of one of our modules; None for anybody else's."""
  parts = module.split(".")
  if parts[0] == "jaxkv_kernels":
    return "jaxkv_kernels"
  if parts[0] != "jaxkv":
    return None
  return ".".join(parts[: 3 if parts[1:2] == ["_src"] else 2])


_PAIRS = [(name, other) for name in _PACKAGES for other in _imports(name)]
"""(module, what it imports) for all modules."""


def test_every_module_has_a_layer():
  """Add new packages to _LAYERS."""
  assert {_layer(module) for module in _PACKAGES} - set(_RANK) == set()


def test_imports_only_downwards():
  assert [
    (module, imported)
    for module, imported in _PAIRS
    if _layer(imported) not in (None, _layer(module))
    and _RANK[_layer(imported)] <= _RANK[_layer(module)]
  ] == []


def _is_private(module: str) -> bool:
  return module.startswith("jaxkv._src")


def _is_public(module: str) -> bool:
  return module.partition(".")[0] == "jaxkv" and not _is_private(module)


def _is_client(module: str) -> bool:
  return module.startswith(_CLIENTS)


def test_private_code_imports_no_public_module():
  """Public modules collect names for users and are imported by clients only."""
  assert [
    (module, imported)
    for module, imported in _PAIRS
    if _is_private(module) and not _is_client(module) and _is_public(imported)
  ] == []


def test_clients_import_public_names():
  assert [
    (module, imported)
    for module, imported in _PAIRS
    if _is_client(module)
    and _is_private(imported)
    and _layer(imported) != _layer(module)
    and imported not in _OPEN_TO_CLIENTS
  ] == []


def test_nothing_imports_clients():
  """Only the modules through which users see them do."""
  faces = ("jaxkv.__main__", "jaxkv.integrations", *_CLIENTS)
  assert [
    (module, imported)
    for module, imported in _PAIRS
    if _is_client(imported) and not module.startswith(faces)
  ] == []


def test_kernels_are_used_by_public_names():
  assert [
    (module, imported)
    for module, imported in _PAIRS
    if not module.startswith("jaxkv_kernels")
    and imported.startswith("jaxkv_kernels._")
  ] == []


def test_few_modules_are_loose():
  loose = {path.stem for path in (_ROOT / "jaxkv" / "_src").glob("*.py")}
  assert loose - {"__init__"} == _LOOSE


def test_no_import_cycle():
  graph = {name: set(_imports(name)) - {name} for name in _PACKAGES}
  graphlib.TopologicalSorter(graph).prepare()


def test_imports_are_the_dependencies():
  """An installation brings what is imported, and nothing else."""
  project = tomllib.loads((_ROOT / "pyproject.toml").read_text("utf-8"))
  declared = {
    re.split(r"[<>=!~\[; ]", requirement)[0].replace("-", "_")
    for requirement in project["project"]["dependencies"]
  }
  imported = {
    name.partition(".")[0] for module in _PACKAGES for name in _imports(module)
  }
  ours = {"jaxkv", "jaxkv_kernels"}
  assert imported - set(sys.stdlib_module_names) - ours == declared


def _asked_for(tree: ast.Module) -> Iterator[tuple[str, str]]:
  """Package and extra in the calls of `extra_package` that name both."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
      if node.func.id == "extra_package" and _is_text(node.args[0]):
        name = ast.literal_eval(node.args[0]).partition(".")[0]
        named = {word.arg: word.value for word in node.keywords}
        install = ast.literal_eval(named["install"])
        if install.startswith("jaxkv["):
          yield name, install.removeprefix("jaxkv[").removesuffix("]")


def _is_text(node: ast.expr) -> bool:
  return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_extras_bring_what_is_asked_for():
  """Such packages are imported by name, and only where they are needed."""
  project = tomllib.loads((_ROOT / "pyproject.toml").read_text("utf-8"))
  extras = project["project"]["optional-dependencies"]
  for path in _PACKAGES.values():
    for name, extra in _asked_for(_TREES[path]):
      brought = {re.split(r"[<>=!~\[; ]", line)[0] for line in extras[extra]}
      # A package of a namespace has a longer name, as orbax-checkpoint.
      packages = {package.replace("-", "_") for package in brought}
      spaces = {package.partition("_")[0] for package in packages}
      assert name in packages | spaces, path


def _cache_layer(module: str) -> str:
  """The file or folder of the cache that a module is in."""
  return ".".join(module.split(".")[:4])


_CACHE = [pair for pair in _PAIRS if pair[0].startswith(_CACHE_PACKAGE)]


class TestCache:
  def test_depends_on_jax_alone(self):
    allowed = _CACHE_IMPORTS | set(sys.stdlib_module_names)
    ours = (_CACHE_PACKAGE, _ARRAYS_PACKAGE)
    imported = {name for _, name in _CACHE if not name.startswith(ours)}
    assert {name.partition(".")[0] for name in imported} - allowed == set()

  def test_imports_only_downwards(self):
    rank = {
      f"{_CACHE_PACKAGE}.{layer}": rank
      for rank, row in enumerate(_CACHE_LAYERS)
      for layer in row
    }
    for module, imported in _CACHE:
      layer, importer = _cache_layer(imported), _cache_layer(module)
      if layer in rank and layer != importer:
        assert rank[layer] > rank[importer], f"{module} imports {imported}"


def test_files_are_short():
  """A longer file is about two things; split it by them."""
  lines = {p: len(p.read_text("utf-8").splitlines()) for p in _ALL_FILES}
  assert {p: count for p, count in lines.items() if count > _MAX_FILE} == {}


def test_no_class_is_defined_twice():
  """A name has one meaning."""
  homes: dict[str, list[str]] = {}
  for module, path in _PACKAGES.items():
    for node in ast.walk(_TREES[path]):
      if isinstance(node, ast.ClassDef):
        homes.setdefault(node.name, []).append(module)
  repeated = {name: owners for name, owners in homes.items() if owners[1:]}
  assert repeated == {}


def test_no_module_hides_behind_a_function():
  """`package.name` is the module where there is one."""
  for name in _PACKAGES:
    parent, _, attribute = name.rpartition(".")
    if parent and attribute != "__main__":
      importlib.import_module(name)
      package = importlib.import_module(parent)
      assert isinstance(getattr(package, attribute), types.ModuleType), name


def test_few_public_names():
  import jaxkv

  assert len(jaxkv.__all__) <= 41
  assert sorted(jaxkv.__all__) == jaxkv.__all__


def test_files_have_a_name_of_their_own():
  """A file is called by what is in it."""
  assert [path for path in _ALL_FILES if path.name in _NAMELESS] == []


def test_kernels_folder_is_no_package():
  """It would be a top-level package `kernels`, which others are called."""
  assert not (_ROOT / "kernels" / "__init__.py").exists()


def test_test_files_are_not_imported():
  """Code that two test files share is in another module."""
  names = [
    (path, name)
    for path in _ALL_FILES
    for node in ast.walk(_TREES[path])
    for name in _names_in(node)
  ]
  assert [
    (path, name)
    for path, name in names
    if name.startswith("tests.")
    and any(part.startswith("test_") for part in name.split("."))
  ] == []


def _names_in(node: ast.AST) -> list[str]:
  """Returns the names that an import statement may import."""
  if isinstance(node, ast.Import):
    return [alias.name for alias in node.names]
  if isinstance(node, ast.ImportFrom):
    return [f"{node.module}.{alias.name}" for alias in node.names]
  return []
