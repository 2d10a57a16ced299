"""Random regular expressions."""

from hypothesis import strategies as st

_ATOMS = ["a", "b", "é", ".", "[ab]", "[^a]", "[a-z]", r"\w", r"\s", r"\."]
_ATOMS += [r"[^\n-b]", "[à-ÿ]", r"\n", "()", r"\D"]
_SUFFIXES = ["*", "+", "?", "{2}", "{1,}", "{0,2}", "{,1}", "{0}"]

PATTERNS = st.recursive(
  st.sampled_from(_ATOMS),
  lambda inner: st.one_of(
    st.tuples(inner, inner).map("".join),
    st.tuples(inner, inner).map("|".join).map("({})".format),
    st.tuples(inner, st.sampled_from(_SUFFIXES)).map(
      lambda pair: f"(?:{pair[0]}){pair[1]}"
    ),
  ),
  max_leaves=7,
)
