"""What makes a function of a state a public verb."""

import functools
from collections.abc import Callable
from typing import Any
from typing import ParamSpec
from typing import TypeVar

import jax
from jax import lax

from jaxkv._src.cache.state import check_single

Args = ParamSpec("Args")
Out = TypeVar("Out")


def verb(function: Callable[Args, Out]) -> Callable[Args, Out]:
  """Jits a function; inside `shard_map` its arguments vary alike.

  Jitted once, here, and never donating: the old state stays usable, and inside
  the caller's own jit the verb is inlined and the caller donates. What is not
  one cache is refused when the verb is traced.
  """

  @functools.wraps(function)
  def aligned(*args: Args.args, **kwargs: Args.kwargs) -> Out:
    if args or "state" in kwargs:
      check_single(args[0] if args else kwargs["state"])
    args, kwargs = alike((args, kwargs))
    return function(*args, **kwargs)

  return jax.jit(aligned)


def alike(tree: Any) -> Any:
  """Makes arrays vary over all mesh axes that any of them varies over.

  Inside `shard_map` a loop's carry must not start to vary on the way. A state
  made inside the shard is the same on all devices at first and tokens are not,
  or the other way round; outside of `shard_map` nothing is done.
  """
  axes = frozenset().union(*map(_axes, jax.tree.leaves(tree)))
  if not axes:
    return tree

  def widened(leaf: Any) -> Any:
    missing = tuple(axes - _axes(leaf))
    return lax.pcast(leaf, missing, to="varying") if missing else leaf

  return jax.tree.map(widened, tree)


def _axes(leaf: Any) -> frozenset[str]:
  return jax.typeof(leaf).manual_axis_type.varying
