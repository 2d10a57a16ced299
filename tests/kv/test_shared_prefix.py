"""Rows that share pages, read once; and drafts in trees."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
import jaxkv_kernels as kernels
from jaxkv import kv as memory
from jaxkv import models
from jaxkv_kernels._src.attention import shared_prefix
from tests.kernels.backends import call_of
from tests.kernels.shapes import assert_matches
from tests.kv.memory import draw
from tests.models import tiny_decoders as tiny
from tests.tools.traced_loops import equations
from tests.tools.traced_loops import in_loops

WINDOW = kernels.AttentionOptions(window=40)
SAMPLES, PROMPT, SIZE, HEADS, KV_HEADS, DIM = 3, 70, 8, 4, 2, 32
SIZES = jaxkv.CacheConfig(
  num_pages=64, page_size=SIZE, num_slots=6, pages_per_slot=12
)


@pytest.fixture(scope="module")
def forked():
  """Two prompts in slots 0 and 3, each forked twice; and poisoned memory."""
  state = jaxkv.init(SIZES)
  prompts = jnp.arange(6 * PROMPT, dtype=jnp.int32).reshape(6, PROMPT)
  leaders = jnp.asarray([True, False, False, True, False, False])
  lengths = jnp.where(leaders, PROMPT, 0)
  slots = jnp.arange(6, dtype=jnp.int32)
  state, entered = jaxkv.admit(state, slots, prompts, lengths, mask=leaders)
  assert entered.ok.tolist() == leaders.tolist()
  kv = memory.init(
    SIZES, num_layers=2, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=jnp.float32
  )
  kv = jax.tree.map(lambda x: jnp.full_like(x, np.nan), kv)
  view = memory.View(
    page_table=state.page_table[:, 0], starts=state.length, num_tokens=lengths
  )
  k, v = (draw(seed, 6, PROMPT, KV_HEADS, DIM) for seed in (0, 1))
  kv = memory.write(kv, view, 1, k, v)
  state, _ = jaxkv.commit(state, prompts, lengths)
  state, forks = jaxkv.fork(
    state, jnp.asarray([0, 0, 3, 3]), jnp.asarray([1, 2, 4, 5])
  )
  assert forks.ok.all()
  return state, memory.copy(kv, *forks.copies)


def next_tokens(state, kv, steps):
  """Returns a view of the last of `steps` new tokens, and the memory."""
  view = None
  for step in range(steps):
    ones = jnp.ones((6,), jnp.int32)
    state, room = jaxkv.allocate(state, ones)
    assert room.ok.all()
    view = memory.View(
      page_table=state.page_table[:, 0], starts=state.length, num_tokens=ones
    )
    k, v = (draw(2 * step + s, 6, 1, KV_HEADS, DIM) for s in (4, 5))
    kv = memory.write(kv, view, 1, k, v)
    state, _ = jaxkv.commit(state, jnp.full((6, 1), step, jnp.int32), ones)
  return view, kv


@pytest.fixture
def always(monkeypatch):
  """Shares pages whatever the savings."""
  savings = dict.fromkeys(shared_prefix._LEAST_SAVING, -(2**20))
  monkeypatch.setattr(shared_prefix, "_LEAST_SAVING", savings)


@pytest.mark.slow
class TestShare:
  @pytest.mark.parametrize("steps", [1, 3])
  def test_shared_forks_do_not_change_attention(self, always, forked, steps):
    view, kv = next_tokens(*forked, steps)
    shared = memory.share(kv, view, num_clusters=2, cluster_size=SAMPLES)
    np.testing.assert_array_equal(
      np.sort(shared.shared.members, axis=0), [[0, 1, 2], [3, 4, 5]]
    )
    np.testing.assert_array_equal(shared.shared.tokens, PROMPT // SIZE * SIZE)
    q = draw(9, 6, 1, HEADS, DIM)
    options = call_of(sinks=draw(10, HEADS))
    expected = memory.attend_with_lse(kv, view, 1, q, **options)
    out, lse = memory.attend_with_lse(kv, shared, 1, q, **options)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out, expected[0], atol=1e-6)
    np.testing.assert_allclose(lse, expected[1], atol=1e-5)

  def test_idle_rows_have_no_output(self, always, forked):
    view, kv = next_tokens(*forked, 1)
    num_tokens = jnp.asarray([1, 0, 1, 0, 0, 1], jnp.int32)
    view = dataclasses.replace(view, num_tokens=num_tokens)
    shared = memory.share(kv, view, num_clusters=2, cluster_size=SAMPLES)
    q = draw(9, 6, 1, HEADS, DIM)
    options = call_of(sinks=draw(10, HEADS))
    expected = memory.attend_with_lse(kv, view, 1, q, **options)
    out, lse = memory.attend_with_lse(kv, shared, 1, q, **options)
    np.testing.assert_allclose(out, expected[0], atol=1e-6)
    np.testing.assert_array_equal(lse[num_tokens == 0], -np.inf)

  def test_idle_rows_are_in_no_cluster(self, always, forked):
    view, kv = next_tokens(*forked, 1)
    num_tokens = jnp.asarray([1, 0, 1, 1, 1, 0], jnp.int32)
    view = dataclasses.replace(view, num_tokens=num_tokens)
    shared = memory.share(kv, view, num_clusters=2, cluster_size=SAMPLES)
    members = np.sort(shared.shared.members, axis=0)
    np.testing.assert_array_equal(members, [[0, 2, 6], [3, 4, 6]])

  def test_clusters_may_be_given(self, always, forked):
    """Rows 0 and 2 of one prompt; then also row 5, of the other one."""
    view, kv = next_tokens(*forked, 1)
    for rows, tokens in (([0, 2], PROMPT // SIZE * SIZE), ([0, 2, 5], 0)):
      clusters = jnp.full((6,), -1, jnp.int32).at[jnp.asarray(rows)].set(0)
      shared = memory.share(
        kv, view, num_clusters=1, cluster_size=SAMPLES, clusters=clusters
      )
      members = [*rows, 6][:SAMPLES]
      np.testing.assert_array_equal(shared.shared.members, [members])
      np.testing.assert_array_equal(shared.shared.tokens, [tokens])

  def test_a_window_is_attended_to_without_sharing(self, always, forked):
    view, kv = next_tokens(*forked, 1)
    shared = memory.share(kv, view, num_clusters=2, cluster_size=SAMPLES)
    q = draw(9, 6, 1, HEADS, DIM)
    expected = memory.attend(kv, view, 1, q, options=WINDOW)
    out = memory.attend(kv, shared, 1, q, options=WINDOW)
    np.testing.assert_array_equal(out, expected)

  @pytest.mark.parametrize("change", ["later", "earlier", "idle", "other"])
  def test_pages_that_rows_no_longer_share_are_not_read(
    self, always, forked, change
  ):
    view, kv = next_tokens(*forked, 3)
    at = dataclasses.replace(view, starts=view.starts - 2)
    at = memory.share(kv, at, num_clusters=2, cluster_size=SAMPLES)
    is_changed = jnp.asarray([False, True, False, False, True, True])
    changes = {
      "later": {"starts": view.starts},
      # To a position inside the shared pages; row 1 to their end.
      "earlier": {"starts": jnp.where(is_changed, 20, at.starts).at[1].set(63)},
      "idle": {"num_tokens": jnp.where(is_changed, 0, at.num_tokens)},
      "other": {
        "page_table": jnp.where(is_changed[:, None], view.page_table[::-1], 63)
        .at[0]
        .set(view.page_table[0])
      },
    }[change]
    if change == "other":  # page 63 belongs to nobody and holds NaN
      changes["num_tokens"] = at.num_tokens.at[jnp.array([2, 3])].set(0)
    moved = dataclasses.replace(at, **changes)
    q = draw(9, 6, 1, HEADS, DIM)
    slopes = jnp.asarray([0.5, 0.25, 0.1, 0.05])
    options = call_of(alibi_slopes=slopes)
    unshared = dataclasses.replace(moved, shared=None)
    expected = memory.attend_with_lse(kv, unshared, 1, q, **options)
    assert np.isfinite(expected[0]).all()
    out, lse = memory.attend_with_lse(kv, moved, 1, q, **options)
    np.testing.assert_allclose(out, expected[0], atol=1e-6)
    np.testing.assert_allclose(lse, expected[1], atol=1e-5)
    np.testing.assert_array_equal(out[moved.num_tokens == 0], 0)

  def test_shared_pages_of_another_width_are_refused(self, always, forked):
    view, kv = next_tokens(*forked, 1)
    view = memory.share(kv, view, num_clusters=2, cluster_size=SAMPLES)
    narrow = dataclasses.replace(view, page_table=view.page_table[:, :10])
    with pytest.raises(ValueError, match=r"`view.shared` .* one for \(6, 12\)"):
      memory.attend(kv, narrow, 1, draw(9, 6, 1, HEADS, DIM))
    reshared = memory.share(kv, narrow, num_clusters=2, cluster_size=SAMPLES)
    assert reshared.shared.own_table.shape == (6, 10)


class TestRefreshShared:
  @pytest.fixture
  def shared(self, forked, always):
    """A view in which all rows share pages."""
    view, kv = next_tokens(*forked, 1)
    return memory.share(kv, view, num_clusters=2, cluster_size=SAMPLES), kv

  @pytest.mark.slow
  def test_fresh_views_survive_transformations(self, shared):
    """Its type survives tree maps, jit and scan."""
    view, kv = shared
    fresh = memory.refresh_shared(kv, view)
    jax.tree.map(np.testing.assert_array_equal, fresh.view, view)
    passed = {
      "tree": jax.tree.map(lambda x: x, fresh),
      "jit": jax.jit(lambda fresh: fresh)(fresh),
      "scan": jax.lax.scan(lambda at, _: (at, None), fresh, None, 1)[0],
    }
    for name, view_after in passed.items():
      assert isinstance(view_after, memory.FreshView), name

  def test_a_fresh_view_is_for_one_step(self, shared):
    """A fresh view was checked for its rows; the next step needs `view`."""
    view, kv = shared
    fresh = memory.refresh_shared(kv, view)
    with pytest.raises(TypeError, match="starts"):
      dataclasses.replace(fresh, starts=view.starts + 1)
    assert isinstance(fresh.view, memory.View)
    with pytest.raises(TypeError, match="`view` must be a View, got FreshView"):
      memory.refresh_shared(kv, fresh)

  def test_packed_views_are_refused(self, shared):
    view, kv = shared
    packed = memory.PackedView(decode=view)
    with pytest.raises(TypeError, match="must be a View, got PackedView"):
      memory.share(kv, packed, num_clusters=1, cluster_size=2)

  def test_a_view_without_shared_pages(self, shared):
    view, kv = shared
    unshared = dataclasses.replace(view, shared=None)
    q = draw(9, 6, 1, HEADS, DIM)
    fresh = memory.refresh_shared(kv, unshared)
    np.testing.assert_array_equal(
      memory.attend(kv, fresh, 1, q), memory.attend(kv, unshared, 1, q)
    )

  @pytest.mark.slow
  def test_refresh_in_a_loop_equals_unshared_attention(self, shared):
    """Rows advance and end in a loop; shared pages are found before it."""
    view, kv = shared

    @functools.partial(jax.jit, static_argnames="checked")
    def steps(kv, view, q, checked):
      def step(view, _):
        rows = memory.refresh_shared(kv, view) if checked else view
        out = memory.attend(kv, rows, 1, q)
        view = dataclasses.replace(
          view, num_tokens=view.num_tokens.at[0].set(0), starts=view.starts - 1
        )
        return view, out

      return jax.lax.scan(step, view, None, length=3)[1]

    q = draw(9, 6, 1, HEADS, DIM)
    unshared = dataclasses.replace(view, shared=None)
    expected = steps(kv, unshared, q, checked=False)
    for checked in (False, True):
      out = steps(kv, view, q, checked=checked)
      np.testing.assert_allclose(out, expected, atol=1e-6)

  def test_idle_rows_leave_their_cluster(self, shared):
    view, kv = shared
    is_idle = jnp.asarray([True, False, False, True, True, True])
    moved = dataclasses.replace(
      view, num_tokens=jnp.where(is_idle, 0, view.num_tokens)
    )
    fresh = memory.refresh_shared(kv, moved)
    shared_pages = fresh.view.shared
    np.testing.assert_array_equal(shared_pages.tokens, [PROMPT // 8 * 8, 0])
    np.testing.assert_array_equal(shared_pages.own_tokens > 0, ~is_idle)
    q = draw(9, 6, 1, HEADS, DIM)
    np.testing.assert_array_equal(
      memory.attend(kv, fresh, 1, q), memory.attend(kv, moved, 1, q)
    )

  @pytest.mark.parametrize("fresh", [True, False])
  def test_layers_do_not_compare_tables(self, shared, fresh):
    """XLA for a GPU or a TPU would leave the comparison in the loop."""
    view, kv = shared

    def layers(kv, view, q):
      rows = memory.refresh_shared(kv, view) if fresh else view

      def layer(q, index):
        return q + memory.attend(kv, rows, index, q), None

      return jax.lax.scan(layer, q, jnp.arange(2, dtype=jnp.int32))[0]

    q = draw(9, 6, 1, HEADS, DIM)
    assert compares_tables(in_loops(layers, kv, view, q), view) != fresh

  @pytest.mark.slow
  @pytest.mark.parametrize("windows", [(None,), (None, 3)])
  def test_layers_of_a_model_do_not_compare_tables(self, shared, windows):
    view, kv = shared
    heads = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM}
    config = tiny.llama(num_layers=2, **heads, windows=windows)
    params = models.init_params(jax.random.key(0), config)
    tokens = jnp.ones((6, 1), jnp.int32)
    decode = functools.partial(models.forward, config=config)
    views = (view,) * len(windows)
    batch = memory.Batch(
      tokens=tokens, positions=view.starts[:, None], views=views
    )
    arguments = (params, batch, kv)
    assert compares_tables(equations(decode, *arguments), view)
    assert not compares_tables(in_loops(decode, *arguments), view)


def compares_tables(equations, view):
  """Returns True if equations compare page tables page by page."""
  return any(
    equation.primitive.name == "eq"
    and equation.outvars[0].aval.shape == view.page_table.shape
    for equation in equations
  )


class TestTree:
  def test_tree_branches_equal_separate_sequences(self, forked):
    state, kv = forked
    num_tokens = jnp.asarray([4, 0, 0, 0, 0, 0], jnp.int32)
    state, _ = jaxkv.allocate(state, num_tokens)
    view = memory.View(
      page_table=state.page_table[:, 0],
      starts=state.length,
      num_tokens=num_tokens,
    )
    k, v = (draw(seed, 6, 4, KV_HEADS, DIM) for seed in (4, 5))
    q = draw(6, 6, 4, HEADS, DIM)
    # Branches 0, 1 and 2, 3.
    mask = jnp.asarray(np.kron(np.eye(2), np.tri(2)), bool)
    tree = memory.attend_with_lse(
      memory.write(kv, view, 1, k, v),
      view,
      1,
      q,
      options=kernels.AttentionOptions(
        tree_mask=jnp.broadcast_to(mask, (6, 4, 4))
      ),
    )
    short = dataclasses.replace(view, num_tokens=jnp.minimum(num_tokens, 2))
    for branch in (slice(0, 2), slice(2, 4)):
      single = memory.attend_with_lse(
        memory.write(kv, short, 1, k[:, branch], v[:, branch]),
        short,
        1,
        q[:, branch],
      )
      expected = [np.asarray(x[:1], np.float64) for x in single]
      assert_matches(*(x[:1, branch] for x in tree), *expected, np.float32)
