"""Mutants of the automata, with the test that notices each."""

import jax.numpy as jnp

from tests.tools.mistakes import given
from tests.tools.mistakes import returned
from tests.tools.mistakes import table

_ADVANCE = "test_token_bytes.py::TestAdvanceStates::"
_THOUSAND = (
  "test_stop_strings.py::"
  "test_a_thousand_random_strings_over_a_byte_level_vocabulary"
)
_BITS = "test_bitmask.py::"
_CHARACTERS = "test_characters.py::test_valid_utf8"
_DFA = "test_dfa.py::"
_SCHEMA = "test_schema.py::test_refuses_by_name"
_EFFECTS = "test_allowed_tokens.py::"
_SEVERAL = "test_guide.py::TestSeveralGrammars::"

_TABLE = {
  # --- token_bytes -----------------------------------------------------------
  "a token of -1 is the last one": (
    "token_bytes:fold_bytes",
    given(numbers=lambda g: g.numbers % g.tokens.vocab_size),
    _ADVANCE + "test_a_token_out_of_range_has_no_bytes[-1]",
  ),
  # --- stop_strings ----------------------------------------------------------
  "a list is known by its first string": (
    "stop_strings:_as_bytes",
    returned(lambda out, g: out[:1]),
    _THOUSAND,
  ),
  # --- bitmask ---------------------------------------------------------------
  "the first token is bit 1": (
    "bitmask:mask_logits",
    given(bits=lambda g: g.bits << jnp.uint32(1)),
    _BITS + "TestMaskLogits::test_token_33_is_bit_1_of_word_1",
  ),
  # --- grammars --------------------------------------------------------------
  "surrogates are characters": (
    "characters:_byte_strings",
    given(
      high=lambda g: b"\xed\xbf\xbf" if g.high == b"\xed\x9f\xbf" else g.high
    ),
    _CHARACTERS,
  ),
  "loops leak into what is before them": (
    "nfa:Nfa._successor",
    returned(lambda out, g: g.start),
    _DFA + "TestByHand::test_loops_do_not_leak_into_the_parts_around_them",
  ),
  "states that differ late are one": (
    "minimize:_refine",
    returned(lambda out, g: g.block),
    _DFA + "TestByHand::test_states_that_differ_after_two_bytes_are_kept_apart",
  ),
  "states that accept the same are two": (
    "minimize:_refine",
    returned(lambda out, g: jnp.arange(len(out)).__array__()),
    _DFA + "TestByHand::test_equal_suffixes_share_states",
  ),
  # --- schema ----------------------------------------------------------------
  "unknown keywords are ignored": (
    "schema:_check_keywords",
    given(keywords=lambda g: g.keywords - {"minimum"}),
    _SCHEMA,
  ),
  # --- allowed_tokens --------------------------------------------------------
  "ways that no token goes": (
    "allowed_tokens:_distances",
    returned(lambda out, g: out.clip(max=3)),
    _EFFECTS + "TestByHand::test_texts_that_tokens_cannot_spell_are_not_begun",
  ),
  # --- guide -----------------------------------------------------------------
  "all sequences have the first grammar": (
    "guide:Guide._grammars",
    returned(lambda out, g: out * 0),
    _SEVERAL + "test_sequences_have_different_grammars",
  ),
}

MUTANTS = table("jaxkv._src.guides", "tests/guides", _TABLE)
