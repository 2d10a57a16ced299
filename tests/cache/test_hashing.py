"""Are page keys as good as random, who can make two equal, and what then?"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.prefix import prefix_index
from tests.cache.by_hand import ints
from tests.cache.setups import NumberedConfig

BITS = np.uint32(1) << np.arange(32, dtype=np.uint32)


def secret(*key):
  """The secrets of three groups, from a key of up to four words."""
  words = [*key, 0, 0, 0, 0][:4]
  return hashing.make_secret(jnp.asarray(words, jnp.uint32), 3)


SECRET = secret(1, 2, 3, 4)


@jax.jit
def digests_of(secrets, tokens):
  return hashing.page_digests(secrets, tokens)


def digests(tokens, secrets=SECRET):
  return digests_of(secrets, jnp.asarray(tokens))


@jax.jit
def whole_keys(secrets, tokens, epoch, salt, group):
  """Keys of first pages, each of a separate sequence."""
  root = hashing.root_key(secrets, epoch, salt)
  start = jnp.broadcast_to(root, (tokens.shape[0], 4))
  chain = hashing.row_keys(secrets, start, tokens[:, None])[:, 0]
  groups = jnp.broadcast_to(group, tokens.shape[:1])
  return hashing.group_key(secrets, chain, groups)


def as_uint64(keys):
  """The two halves of each key, uint64[..., 2]."""
  return np.ascontiguousarray(np.asarray(keys)).view(np.uint64)


def distinct(keys):
  """Counts the keys that differ in their first, and in their last 64 bits."""
  halves = as_uint64(keys).reshape(-1, 2)
  return [
    1 + int(np.count_nonzero(np.diff(np.sort(half)))) for half in halves.T
  ]


def bits(keys):
  """bool[..., 128]: the bits of keys."""
  keys = np.asarray(keys)
  return (keys[..., None] & BITS != 0).reshape(*keys.shape[:-1], -1)


# --- the definition ---------------------------------------------------------


def python_permutation(words):
  """Chaskey's permutation, 8 rounds, on Python integers."""
  mask = 2**32 - 1

  def rotate(x, n):
    return (x << n | x >> (32 - n)) & mask

  a, b, c, d = words
  for _ in range(8):
    a = (a + b) & mask
    b = rotate(b, 5) ^ a
    a = rotate(a, 16)
    c = (c + d) & mask
    d = rotate(d, 8) ^ c
    a = (a + d) & mask
    d = rotate(d, 13) ^ a
    c = (c + b) & mask
    b = rotate(b, 7) ^ c
    c = rotate(c, 16)
  return a, b, c, d


class TestDefinition:
  @pytest.mark.parametrize("num_tokens", [1, 3, 4, 9])
  def test_digest_absorbs_four_tokens_at_a_time(self, num_tokens):
    tokens = np.random.default_rng(num_tokens).integers(
      -(2**31), 2**31, (3, num_tokens)
    )
    state = tuple(int(word) for word in SECRET[0])
    for row in tokens:
      words = [int(t) % 2**32 for t in row] + [0] * (-num_tokens % 4)
      key = state
      for i in range(0, len(words), 4):
        block = words[i : i + 4]
        key = python_permutation(
          [a ^ b for a, b in zip(key, block, strict=True)]
        )
      got = digests(jnp.asarray(row[None], jnp.int32))
      assert tuple(int(word) for word in got[0]) == key

  def test_chain_is_page_by_page(self):
    rng = np.random.default_rng(0)
    previous = rng.integers(0, 2**32, (2, 4), dtype=np.uint32)
    pages = rng.integers(0, 2**32, (2, 5, 4), dtype=np.uint32)
    keys = np.asarray(jax.jit(hashing.chain_keys)(previous, pages))
    for row in range(2):
      key = tuple(int(word) for word in previous[row])
      for column in range(5):
        mixed = [
          a ^ int(b) for a, b in zip(key, pages[row, column], strict=True)
        ]
        key = python_permutation(mixed)
        assert tuple(int(word) for word in keys[row, column]) == key


# --- quality ----------------------------------------------------------------


def flips(function, inputs, bit):
  """Probability that each of 128 output bits flips with one input bit."""
  word, bit_in_word = divmod(bit, 32)
  changed = inputs.copy()
  changed[:, word] ^= BITS[bit_in_word]
  return np.mean(bits(function(inputs)) != bits(function(changed)), axis=0)


class TestAvalanche:
  """4,096 samples: half a per cent is 0.64 sigma, five per cent are 6.4."""

  samples = 4096

  def check(self, function, words):
    inputs = np.random.default_rng(0).integers(
      0, 2**32, (self.samples, words), dtype=np.uint32
    )
    function = jax.jit(function)
    rates = np.stack([flips(function, inputs, b) for b in range(32 * words)])
    assert 0.45 < rates.min() and rates.max() < 0.55
    assert abs(rates.mean() - 0.5) < 0.001

  def test_tokens(self):
    def key(words):
      tokens = jax.lax.bitcast_convert_type(words, jnp.int32)
      return hashing.page_digests(SECRET, tokens)

    self.check(key, 6)

  def test_previous_key(self):
    def key(words):
      digests = jnp.zeros((len(words), 1, 4), "uint32")
      return hashing.chain_keys(words, digests)[:, 0]

    self.check(key, 4)

  def test_salt(self):
    self.check(lambda w: hashing.root_key(SECRET, jnp.uint32(0), w), 4)

  @pytest.mark.parametrize("row", range(3))
  def test_secret(self, row):
    secrets = jax.vmap(lambda key: hashing.make_secret(key, 1)[row])
    self.check(secrets, 4)

  def test_epoch(self):
    root = jax.vmap(lambda epoch: hashing.root_key(SECRET, epoch, None))
    self.check(lambda words: root(words[:, 0]), 1)


class TestCollisions:
  def test_no_two_of_ten_million_keys_agree_in_64_bits(self):
    """By chance that happens once in 370,000 runs."""
    chunk = 1_000_000
    keys = np.concatenate(
      [
        as_uint64(digests(_counters(start, chunk)))[:, 0]
        for start in range(0, 10_000_000, chunk)
      ]
    )
    keys.sort()
    assert np.all(keys[1:] != keys[:-1])

  def test_equal_pages_at_other_places_of_a_sequence(self):
    """A chain of zero pages never comes back; nor does a chain of any page."""
    pages = jnp.zeros((1, 10_000, 4), jnp.uint32)
    start = jnp.full((1, 4), 7, jnp.uint32)
    for page in (pages, pages + jnp.uint32(1)):
      keys = jax.jit(hashing.chain_keys)(start, page)
      assert distinct(keys) == [10_000] * 2

  def test_swapped_pages_of_a_sequence(self):
    """The order of the pages counts, not only which there are."""
    rng = np.random.default_rng(0)
    pages = rng.integers(0, 2**32, (8, 4), dtype=np.uint32)
    orders = np.stack([rng.permutation(8) for _ in range(20_000)])
    orders = np.unique(orders, axis=0)
    start = jnp.zeros((len(orders), 4), jnp.uint32)
    keys = jax.jit(hashing.chain_keys)(start, jnp.asarray(pages[orders]))
    assert distinct(keys[:, -1]) == [len(orders)] * 2


class TestSeparation:
  """Whatever makes a key private makes all keys differ."""

  def keys(self, secrets=SECRET, epoch=0, salts=None, group=0):
    tokens = _counters(0, 20_000)
    if salts is None:
      salts = np.zeros((4,), np.uint32)
    return np.asarray(
      whole_keys(secrets, tokens, np.uint32(epoch), salts, group)
    )

  def all_differ(self, *sets):
    num_keys = sum(len(keys) for keys in sets)
    assert distinct(np.concatenate(sets)) == [num_keys] * 2

  def test_secrets(self):
    """Keys that differ in one bit, and all rows of one secret."""
    keys = ((), (1,), (2,), (1 << 31,), (0, 1), (0, 0, 1), (0, 0, 0, 1))
    self.all_differ(*(self.keys(secret(*key)) for key in keys))
    rows = np.concatenate([secret(*key) for key in keys])
    assert distinct(rows) == [len(rows)] * 2

  def test_epochs(self):
    epochs = (0, 1, 2, 2**31, 2**32 - 1)
    self.all_differ(*(self.keys(epoch=e) for e in epochs))

  def test_salts(self):
    salts = [np.eye(4, dtype=np.uint32)[i] for i in range(4)]
    salts += [hashing.salt("a"), hashing.salt("b"), hashing.salt("")]
    self.all_differ(self.keys(), *(self.keys(salts=s) for s in salts))

  def test_groups(self):
    self.all_differ(*(self.keys(group=g) for g in range(3)))

  def test_epoch_is_not_a_salt(self):
    """No salt of epoch 0 in a simple relation to 1 gives epoch 1."""
    salts = np.zeros((3, 4), np.uint32)
    salts[:, 0] = 1, 2, 3
    self.all_differ(self.keys(epoch=1), *(self.keys(salts=s) for s in salts))

  def test_text_and_bytes_give_one_salt(self):
    assert np.array_equal(hashing.salt("ä"), hashing.salt("ä".encode()))

  @pytest.mark.parametrize("text", [3, None, ["a"]])
  def test_salts_of_other_types_are_refused(self, text):
    with pytest.raises(TypeError, match="text` must be a str or bytes, got"):
      jaxkv.salt(text)


# --- what if two keys were equal ----------------------------------------------


def constant(secrets, tokens):
  """The weakest digest there is."""
  return jnp.zeros((*tokens.shape[:-1], 4), jnp.uint32)


class TestCollision:
  """A hit is believed only if the page holds the tokens that were asked for."""

  cfg = NumberedConfig(
    num_pages=16, page_size=2, num_slots=3, pages_per_slot=4, number=99
  )

  def cache(self):
    """A cache that holds 1 2 3 4."""
    state = jaxkv.init(self.cfg)
    num_tokens = jnp.asarray([4, 0, 0], jnp.int32)
    tokens = jnp.tile(jnp.asarray([[1, 2, 3, 4]], jnp.int32), (3, 1))
    state, _ = jaxkv.allocate(state, num_tokens)
    state, out = jaxkv.commit(state, tokens, num_tokens)
    assert out.num_published_pages.tolist() == [2, 0, 0]
    return state

  def cached(self, state, *rows):
    """Returns the hit tokens of each row."""
    tokens = jnp.asarray(rows, jnp.int32)
    lengths = jnp.full((len(rows),), tokens.shape[1], jnp.int32)
    return jaxkv.match(state, tokens, lengths).num_cached_tokens.tolist()

  def test_equal_digests_of_other_tokens_are_no_hit(self, monkeypatch):
    """Every page has the key of every other page in its place of the chain."""
    monkeypatch.setattr(hashing, "page_digests", constant)
    state = self.cache()
    num_cached = self.cached(
      state,
      (1, 2, 3, 4, 0),  # What is there.
      (1, 2, 3, 5, 0),  # One token of the second page is another.
      (9, 2, 3, 4, 0),  # One of the first.
      (2, 1, 3, 4, 0),  # The same in another order.
      (1, 2, 1, 2, 0),  # The first page again: another place in the chain.
    )
    assert num_cached == [4, 2, 0, 0, 2]

  @pytest.mark.slow
  def test_collisions_are_not_merged(self, monkeypatch):
    """A page of other tokens must not take another sequence's place."""
    monkeypatch.setattr(hashing, "page_digests", constant)
    cfg = dataclasses.replace(self.cfg, merge_duplicates=True, number=98)
    state = jaxkv.init(cfg)
    num_tokens = jnp.full((3,), 2, jnp.int32)
    tokens = jnp.asarray([[1, 2], [1, 3], [1, 2]], jnp.int32)
    state, _ = jaxkv.allocate(state, num_tokens)
    state, _ = jaxkv.commit(state, tokens, num_tokens)
    jaxkv.check(state)
    table = state.page_table[:, 0, 0].tolist()
    assert table[0] == table[2] != table[1]

  def test_collisions_hit_without_the_token_check(self, monkeypatch):
    """Without a comparison of tokens, the tests above fail."""

    def blind(index, keys, tokens, lookup=prefix_index.lookup, **options):
      index = dataclasses.replace(index, tokens=jnp.zeros_like(index.tokens))
      return lookup(index, keys, jnp.zeros_like(tokens), **options)

    monkeypatch.setattr(hashing, "page_digests", constant)
    monkeypatch.setattr(prefix_index, "lookup", blind)
    self.cfg = dataclasses.replace(self.cfg, number=97)
    assert self.cached(self.cache(), (9, 9, 3, 5, 0)) == [4]


# --- who can make two keys equal ----------------------------------------------


def collision(secrets, rng):
  """Two different pages of eight tokens with one digest under a secret.

  The second half takes back what the first half changed.
  """
  pages = [rng.integers(0, 2**32, 8)]
  pages.append(np.append(rng.integers(0, 2**32, 4), np.zeros(4, np.int64)))
  start = np.asarray(secrets[0], np.int64)
  middle = [
    np.array(python_permutation([int(w) for w in page[:4] ^ start]), np.int64)
    for page in pages
  ]
  pages[1][4:] = pages[0][4:] ^ middle[0] ^ middle[1]
  return np.stack(pages).astype(np.uint32).view(np.int32)


class TestAdversary:
  """Page P, then an attacker's Q with P's digest, then a question behind P."""

  cfg = jaxkv.CacheConfig(
    num_pages=64, page_size=8, num_slots=2, pages_per_slot=3
  )
  key = jnp.asarray([5, 6, 7, 8], jnp.uint32)

  def served(self, key, pages, first_row):
    """Tokens found of P 6, Q 5, P 5 and Q 6 after P 6 and Q 5 were cached."""
    rows = np.concatenate([pages, np.full((2, 8), 6), [[9]] * 2], axis=1)
    rows[1, 8:16] = 5
    state = jaxkv.init(self.cfg, key)
    for row in (first_row, 1 - first_row):
      tokens = rows[[row, row], :16]
      state, _ = jaxkv.allocate(state, ints(16, 0))
      state, _ = jaxkv.commit(state, tokens, ints(16, 0))
      state, _ = jaxkv.free(state, slots=ints(0))
    swapped = rows.copy()
    swapped[:, 8:16] = rows[::-1, 8:16]
    asked = np.concatenate([rows, swapped])
    hit = jaxkv.match(state, asked, jnp.full((4,), 17, jnp.int32))
    jaxkv.check(state)
    return hit.num_cached_tokens.tolist()

  def test_ten_thousand_collisions_of_another_key(self):
    """No two of them are equal under this key, in any bit but by chance."""
    rng = np.random.default_rng(0)
    other_secrets = hashing.make_secret(self.key, 1)
    pairs = np.stack([collision(other_secrets, rng) for _ in range(10_000)])
    other_digests, own_digests = (
      np.asarray(digests(pairs.reshape(-1, 8), secrets)).reshape(-1, 2, 4)
      for secrets in (other_secrets, SECRET)
    )
    assert np.array_equal(other_digests[:, 0], other_digests[:, 1])
    assert distinct(own_digests) == [20_000] * 2

  @pytest.mark.slow
  @pytest.mark.parametrize("first_row", [0, 1])
  def test_collisions_of_another_key_in_a_cache(self, first_row, pytestconfig):
    rng = np.random.default_rng(first_row)
    other_secrets = hashing.make_secret(self.key, 1)
    for _ in range(5000 if pytestconfig.getoption("deep") else 20):
      pages = collision(other_secrets, rng)
      assert self.served(SECRET[1], pages, first_row) == [16, 16, 8, 8]

  @pytest.mark.parametrize("first_row", [0, 1])
  def test_known_keys_allow_false_hits_behind_a_collision(self, first_row):
    """Both are found where they were cached, and `check` blames nobody.

    Behind P a page is found that was computed behind Q: the secret is what
    keeps them apart.
    """
    pages = collision(
      hashing.make_secret(self.key, 1), np.random.default_rng(first_row)
    )
    assert self.served(self.key, pages, first_row) == [16, 16, 16, 16]


def _counters(start, count):
  """Pages that count in their first token, zero behind it."""
  tokens = np.zeros((count, 4), np.int32)
  tokens[:, 0] = np.arange(start, start + count)
  return tokens


def test_every_platform_makes_the_same_keys():
  words = np.random.default_rng(3).integers(0, 2**32, (4, 64), np.uint32)
  words = tuple(jnp.asarray(words))
  looped = jax.jit(functools.partial(hashing._rounds, at_once=2))(words)
  straight = jax.jit(functools.partial(hashing._rounds, at_once=8))(words)
  np.testing.assert_array_equal(looped, straight)
