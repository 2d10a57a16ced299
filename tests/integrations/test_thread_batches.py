"""Batches of calls of several threads: interrupts."""

import contextlib

import pytest

from jaxkv._src.integrations.thread_batches import ThreadBatches


class _InterruptedLock(contextlib.AbstractContextManager):
  """A lock that is interrupted when it is taken for the second time."""

  def __init__(self):
    self._count = 0

  def __enter__(self):
    self._count += 1
    if self._count == 2:
      raise KeyboardInterrupt

  def __exit__(self, *error):
    return None


def test_an_interrupt_before_the_batch_is_raised():
  batches_served = []

  def serve(requests):
    batches_served.append(requests)
    return [2 * value for value in requests]

  batches = ThreadBatches(serve)
  batches._access = _InterruptedLock()
  with pytest.raises(KeyboardInterrupt):
    batches.call(3)
  assert batches.call(4) == 8
  assert batches_served == [[4]]
