"""State changes that happen completely or not at all.

A signal handler runs between any two bytecodes of the main thread and may raise
there, as ctrl-C does. A transition donates the arrays of the state. So no
bytecode may run between its call and the storing of its result: otherwise both
the old and the new state could be lost.
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
  """Makes a transition of a function of a state, arrays and static keywords.

  Returns a function of a `Layout` and the keywords. It returns a compiled
  function from a state's leaves, which it donates, and the arrays to the new
  leaves and the second result of `function`.
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
  """Like `transition`, but donates nothing and returns only the answer."""

  @functools.cache
  def specialized(layout: Layout) -> Callable:
    def call(leaves: Leaves, *args: Array) -> Any:
      return function(layout.unpack(leaves), *args)

    call.__name__ = function.__name__
    return jax.jit(call, compiler_options=CPU_COMPILER_OPTIONS)

  return functools.wraps(function)(specialized)


class Atomic:
  """A state, and the host's part of its last transition.

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
    """The newest state. The next call donates its arrays: copy to keep."""
    return self._layout.unpack(self._results[-1][0])

  @state.setter
  def state(self, state: CacheState) -> None:
    self._results.append((self._layout.pack(state), None))

  def read(self, which: Callable[[Any], Any]) -> np.ndarray:
    """Copies one array of the newest state to the host."""
    return self._layout.read(self._results[-1][0], which)

  def run(
    self,
    specialized: Callable,
    *args: Any,
    then: Callable[[Any], Any] = lambda out: out,
    **static: Any,
  ) -> Any:
    """Runs a transition, and then its part on the host.

    `then` receives the transition's second result, updates the host's data and
    returns the result of `run`. If it is interrupted, the next call runs it
    again, so it must be idempotent.
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
    """Runs a query on the newest state."""
    return self._specialized(specialized)(self._results[-1][0], *args)

  def _specialized(self, function: Callable, **static: Any) -> Callable:
    # By its own names: to compare structures is slow, and can be interrupted.
    name = function, *static.values()
    if name not in self._compiled:
      self._compiled[name] = function(self._layout, **static)
    return self._compiled[name]

  def run_on_host(self, then: Callable[[Any], Any]) -> Any:
    """Changes the host's data alone; `then` must be idempotent too."""
    self._unsettled = None, then
    return self._settle()

  def _settle(self) -> Any:
    """Runs the host's part of the last transition, if it is still pending."""
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
  """Makes a method of an `Atomic` that one thread at a time runs."""

  @functools.wraps(method)
  def call(self: Self, *args: Args.args, **kwargs: Args.kwargs) -> Out:
    with self._lock:  # pyright: ignore[reportPrivateUsage]
      self._settle()  # pyright: ignore[reportPrivateUsage]
      return method(self, *args, **kwargs)

  return call
