"""Every notebook runs from top to bottom, and both its files say the same.

A notebook is a jupytext pair: `.py` is what is reviewed and formatted,
`.ipynb` is what is opened. It runs in a kernel of its own, as its reader
would run it: with one device and jax's default configuration.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

from tests.tools.tiers import slow_except

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_FOLDER = _ROOT / "notebooks"
_NAMES = sorted(
  {p.stem for p in _FOLDER.glob("*.*") if p.suffix in (".py", ".ipynb")}
)
# What a notebook needs beside the extra `notebooks`.
_NEEDS = {"07_grpo_with_tunix": "tunix"}
# For one cell.
_SECONDS = 300
_RUN = f"""
import nbclient, nbformat, sys
notebook = nbformat.read(sys.argv[1], as_version=4)
client = nbclient.NotebookClient(
  notebook, kernel_name="python3", timeout={_SECONDS}
)
client.execute()
"""

over_notebooks = pytest.mark.parametrize("name", _NAMES)


def _cells(path: pathlib.Path) -> list[tuple[str, str]]:
  # Slow to import, and only this needs it.
  import jupytext

  cells = jupytext.read(path).cells
  return [(cell.cell_type, cell.source) for cell in cells]


def test_there_is_a_notebook():
  assert _NAMES, f"no notebook in {_FOLDER.relative_to(_ROOT)}/"


@over_notebooks
@pytest.mark.filterwarnings("ignore:::jupytext", "ignore:::nbformat")
def test_pair_is_in_sync(name):
  pair = [_FOLDER / f"{name}{suffix}" for suffix in (".py", ".ipynb")]
  for path in pair:
    assert path.exists(), f"{path.name} is missing: jupytext --sync"
  text, notebook = (_cells(path) for path in pair)
  assert text == notebook, f"jupytext --sync notebooks/{name}.py"


@slow_except("name", _NAMES, "01_the_cache_as_a_value")
@over_notebooks
def test_runs(name, tmp_path):
  needed = _NEEDS.get(name, "jax")
  if importlib.util.find_spec(needed) is None:
    pytest.skip(f"needs {needed}: pip install -e '.[clients]'")
  paths = [_ROOT, _ROOT / "kernels", os.environ.get("PYTHONPATH", "")]
  environment = os.environ | {
    "PYTHONPATH": os.pathsep.join(str(path) for path in paths if str(path)),
    "IPYTHONDIR": str(tmp_path),
    "JUPYTER_RUNTIME_DIR": str(tmp_path),
  }
  del environment["XLA_FLAGS"]
  # In a process of its own, so that its sockets are gone when it ends; it
  # writes nothing. A cell that fails is printed with its traceback.
  done = subprocess.run(
    (sys.executable, "-c", _RUN, str(_FOLDER / f"{name}.ipynb")),
    cwd=_FOLDER,
    env=environment,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
