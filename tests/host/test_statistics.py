"""What a manager counts of its prefix cache, told once for each interval."""

from jaxkv.host import CacheManager
from tests.host.scheduling import admit
from tests.host.scheduling import request
from tests.host.scheduling import single


def test_a_manager_tells_them_once():
  cache = single(CacheManager, track_residency=True)
  for name in range(3):
    one = request(str(name), range(100 * name, 100 * name + 20))
    admit(cache, one)
    cache.free(one)
  # Ten pages for three times five: the first text was evicted after ten.
  taken = cache.make_prefix_cache_stats()
  assert (sum(taken.lifetime), sum(taken.idle), taken.reset) == (5, 5, False)
  # Published at 0 to 4 and given back at 5; the clock stood at 10.
  assert {bits: n for bits, n in enumerate(taken.lifetime) if n} == {3: 3, 4: 2}
  assert {bits: n for bits, n in enumerate(taken.idle) if n} == {3: 5}
  cache.reset_prefix_cache()
  taken = cache.make_prefix_cache_stats()
  assert (sum(taken.lifetime), taken.reset) == (0, True)
  assert single(CacheManager).make_prefix_cache_stats().lifetime == []
