"""A state that changes whole: a call happened, or it did not.

A signal handler runs between any two bytecodes of the main thread and may raise
there, as ctrl-C does. A transition consumes the arrays of the state, so between
its call and the storing of its result there must be no bytecode: then neither
the old state nor the new one would be left.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any
from typing import Concatenate
from typing import ParamSpec
from typing import TypeVar

import jax
import numpy as np
from jax import Array

from jaxkv._src.arrays.compiler_options import CPU_COMPILER_OPTIONS
from jaxkv._src.cache.state import CacheState
from jaxkv._src.host.layout import Layout
from jaxkv._src.host.layout import Leaves

Args = ParamSpec("Args")
Out = TypeVar("Out")
Self = TypeVar("Self", bound="Atomic")

_called: set[Any] = set()


def transition(function: Callable[..., tuple[CacheState, Any]]) -> Callable:
  """Makes a function of a state, arrays and static keywords a transition.

  Returns:
    A function of a state's layout and the keywords. It returns the compiled
    function, from the leaves of a state, which it consumes, and arrays to new
    leaves and what `function` returns besides.
  """

  @functools.cache
  def specialized(layout: Layout, **static: Any) -> Callable:
    def call(leaves: Leaves, *args: Array) -> tuple[Leaves, Any]:
      state, out = function(layout.unpack(leaves), *args, **static)
      return layout.pack(state), out

    call.__name__ = function.__name__  # The name in profiles.
    return jax.jit(
      call, donate_argnums=0, compiler_options=CPU_COMPILER_OPTIONS
    )

  return functools.wraps(function)(specialized)


def query(function: Callable[..., Any]) -> Callable:
  """Makes a function of a state and arrays a query.

  Returns:
    As `transition`, but nothing is consumed and only the answer is returned.
  """

  @functools.cache
  def specialized(layout: Layout) -> Callable:
    def call(leaves: Leaves, *args: Array) -> Any:
      return function(layout.unpack(leaves), *args)

    call.__name__ = function.__name__
    return jax.jit(call, compiler_options=CPU_COMPILER_OPTIONS)

  return functools.wraps(function)(specialized)


class Atomic:
  """A state, and what is still to be done on the host after its last change.

  Attributes:
    config: sizes of the state.
    state: the newest state.
  """

  def __init__(self, state: CacheState):
    self.config = state.config
    self._lock = threading.RLock()
    self._layout = Layout.of(state)
    # The last entry counts: the leaves, and what the transition to them gave.
    self._results = [(self._layout.pack(state), None)]
    self._compiled: dict[Any, Callable] = {}
    self._unsettled: tuple[Any, Callable[[Any], Any]] | None = None

  @property
  def state(self) -> CacheState:
    """The newest state. The next call takes its arrays: copy what you keep."""
    return self._layout.unpack(self._results[-1][0])

  @state.setter
  def state(self, state: CacheState) -> None:
    self._results.append((self._layout.pack(state), None))

  def read(self, which: Callable[[Any], Any]) -> np.ndarray:
    """An array of the newest state, on the host."""
    return self._layout.read(self._results[-1][0], which)

  def run(
    self,
    specialized: Callable,
    *args: Any,
    then: Callable[[Any], Any] = lambda out: out,
    **static: Any,
  ) -> Any:
    """Runs a transition, and then its part on the host.

    Args:
      specialized: see `transition`.
      *args: its arrays.
      then: takes what the transition gives besides the state, and changes the
        host's data accordingly. If it is interrupted it is run again before
        the next call, so it must be idempotent.
      **static: its static keywords.

    Returns:
      What `then` returns.
    """
    compiled = self._specialized(specialized, **static)
    before = self._results[-1]
    leaves = before[0]
    shapes = compiled, *(leaf.shape for leaf in jax.tree.leaves(args))
    if shapes not in _called:
      # The first call compiles in Python, so it gets a copy to consume.
      leaves = tuple(jax.device_put(leaf, may_alias=False) for leaf in leaves)
    self._unsettled = before, then
    self._results.extend(map(compiled, (leaves,), *((arg,) for arg in args)))
    _called.add(shapes)
    return self._settle()

  def ask(self, specialized: Callable, *args: Any) -> Any:
    """The answer of a query about the newest state."""
    return self._specialized(specialized)(self._results[-1][0], *args)

  def _specialized(self, function: Callable, **static: Any) -> Callable:
    # By its own names: to compare structures is slow, and can be interrupted.
    name = function, *static.values()
    if name not in self._compiled:
      self._compiled[name] = function(self._layout, **static)
    return self._compiled[name]

  def run_on_host(self, then: Callable[[Any], Any]) -> Any:
    """Runs a change of the host's data alone; it must be idempotent too."""
    self._unsettled = None, then
    return self._settle()

  def _settle(self) -> Any:
    """Does what the last transition left to do on the host, if it was made."""
    if self._unsettled is None:
      return None
    before, then = self._unsettled
    newest, answer = self._results[-1], None
    if newest is not before:
      answer = then(newest[1])
    self._unsettled = None
    del self._results[:-1]
    return answer


def atomic(
  method: Callable[Concatenate[Self, Args], Out],
) -> Callable[Concatenate[Self, Args], Out]:
  """A method of an `Atomic` that one thread at a time is in."""

  @functools.wraps(method)
  def call(self: Self, *args: Args.args, **kwargs: Args.kwargs) -> Out:
    with self._lock:  # pyright: ignore[reportPrivateUsage]
      self._settle()  # pyright: ignore[reportPrivateUsage]
      return method(self, *args, **kwargs)

  return call
