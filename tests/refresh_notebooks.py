"""Runs notebooks and keeps their outputs: `python -m tests.refresh_notebooks`.

Arguments are names such as `04_rollouts`; without names it runs all notebooks
whose packages are installed. A notebook runs from top to bottom in a new kernel
with one device and jax's default configuration. Run `jupytext --sync` first.
With `--check` nothing is written, and XLA keeps other flags of the environment,
with which tests compile in a third of the time.
"""

import argparse
import importlib.util
import os
import pathlib
import re
import sys
import tempfile

import nbclient
import nbformat

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = ROOT / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
# Packages that a notebook needs beside the extra `notebooks`.
NEEDS = {"07_grpo_with_tunix": "tunix", "10_several_devices": "orbax"}
_SECONDS_PER_CELL = 300
# Without optimization these compute for longer than they would compile.
_COMPUTING = {"08_grpo_in_one_program"}


def is_runnable(name: str) -> bool:
  """Returns True if the packages of a notebook are installed."""
  return importlib.util.find_spec(NEEDS.get(name, "jax")) is not None


def main(arguments: list[str]) -> None:
  """Runs notebooks; a cell that fails raises with its traceback."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--check", action="store_true", help="write nothing")
  parser.add_argument("names", nargs="*", choices=[*NAMES, []])
  args = parser.parse_args(arguments)
  flags = os.environ.pop("XLA_FLAGS", "")
  fast_flags = re.sub("device_count=[0-9]+", "device_count=1", flags)
  paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
  os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
  with tempfile.TemporaryDirectory() as folder:
    # Histories and connection files of kernels would stay at the user's home.
    os.environ |= {"IPYTHONDIR": folder, "JUPYTER_RUNTIME_DIR": folder}
    for name in args.names or filter(is_runnable, NAMES):
      if args.check:
        os.environ["XLA_FLAGS"] = "" if name in _COMPUTING else fast_flags
      _run(FOLDER / f"{name}.ipynb", save=not args.check)


def _run(path: pathlib.Path, save: bool) -> None:
  notebook = nbformat.read(path, as_version=4)
  nbclient.NotebookClient(
    notebook,
    kernel_name="python3",
    timeout=_SECONDS_PER_CELL,
    record_timing=False,
    resources={"metadata": {"path": str(FOLDER)}},
  ).execute()
  for cell in notebook.cells:
    # Warnings and progress bars differ between runs.
    if "outputs" in cell:
      cell.outputs = [x for x in cell.outputs if x.get("name") != "stderr"]
  # The kernel adds its version of Python.
  notebook.metadata.pop("language_info", None)
  if save:
    nbformat.write(notebook, path)
    print(f"{path.name}: {path.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
  main(sys.argv[1:])
