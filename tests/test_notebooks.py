"""Notebooks run, their pairs are in sync, and they carry their outputs.

A notebook is a jupytext pair: `.py` is reviewed and formatted, `.ipynb` is
opened and has the outputs, so that it can be read on a web page.
"""

import json
import pathlib
import re
import subprocess
import sys

import pytest

from tests import refresh_notebooks
from tests.refresh_notebooks import FOLDER
from tests.refresh_notebooks import NEEDS
from tests.refresh_notebooks import ROOT
from tests.tools.tiers import slow_except

_NAMES = sorted({p.stem for p in FOLDER.glob("*.*") if p.suffix != ".svg"})
_MAX_BYTES = 300_000
# Calls whose result or effect is a picture.
_PICTURE = re.compile(
  r"^(jaxkv\.show\(|plt\.show\(|rollout\.timeline\(|draw\(|picture$)", re.M
)

over_notebooks = pytest.mark.parametrize("name", _NAMES)


def _cells(path: pathlib.Path) -> list[tuple[str, str]]:
  # Slow to import, and only this needs it.
  import jupytext

  cells = jupytext.read(path).cells
  return [(cell.cell_type, cell.source) for cell in cells]


def test_there_is_a_notebook():
  assert _NAMES, f"no notebook in {FOLDER.relative_to(ROOT)}/"


@over_notebooks
@pytest.mark.filterwarnings("ignore:::jupytext", "ignore:::nbformat")
def test_pair_is_in_sync(name):
  pair = [FOLDER / f"{name}{suffix}" for suffix in (".py", ".ipynb")]
  for path in pair:
    assert path.exists(), f"{path.name} is missing: jupytext --sync"
  text, notebook = (_cells(path) for path in pair)
  assert text == notebook, f"jupytext --sync notebooks/{name}.py"


@over_notebooks
def test_outputs_are_kept_and_small(name):
  path = FOLDER / f"{name}.ipynb"
  remedy = f"python -m tests.refresh_notebooks {name}"
  cells = json.loads(path.read_text("utf-8"))["cells"]
  code = [cell for cell in cells if cell["cell_type"] == "code"]
  assert all(cell["execution_count"] for cell in code), remedy
  outputs = [output for cell in code for output in cell["outputs"]]
  assert outputs, remedy
  assert all(output["output_type"] != "error" for output in outputs)
  assert path.stat().st_size <= _MAX_BYTES


@over_notebooks
def test_cells_that_show_a_picture_have_one(name):
  path = FOLDER / f"{name}.ipynb"
  for cell in json.loads(path.read_text("utf-8"))["cells"]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "code" and _PICTURE.search(source):
      formats = {
        media_type
        for output in cell["outputs"]
        for media_type in output.get("data", ())
      }
      assert formats & {"image/svg+xml", "image/png"}, source


@slow_except("name", _NAMES, "03_a_scheduler_in_python")
@over_notebooks
def test_runs(name):
  if not refresh_notebooks.is_runnable(name):
    pytest.skip(f"needs {NEEDS[name]}; the notebook names the extra")
  # In a process of its own, so that its sockets are gone when it ends. A cell
  # that fails is printed with its traceback.
  command = (sys.executable, "-m", "tests.refresh_notebooks", "--check", name)
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
