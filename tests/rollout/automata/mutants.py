"""Mistakes in the automata: one each, and the test that notices it."""

import jax.numpy as jnp

from tests.tools.mistakes import FailsTest
from tests.tools.mistakes import given
from tests.tools.mistakes import returned
from tests.tools.mistakes import text

_ADVANCE = "test_token_bytes.py::TestAdvanceStates::"
_READS = _ADVANCE + "test_every_row_reads_all_bytes_of_its_token"
_ALPHABET = "test_token_bytes.py::TestVocabularyBytes::"
_STOP = "test_stop_strings.py::TestByHand::"
_LISTS = "test_stop_strings.py::TestSequences::"
_THOUSAND = (
  "test_stop_strings.py::"
  "test_a_thousand_random_strings_over_a_byte_level_vocabulary"
)
_BITS = "test_bitmask.py::"
_CHARACTERS = "test_characters.py::test_valid_utf8"
_REGEX = "test_regex.py::"
_DFA = "test_byte_dfa.py::"
_JSON = "test_json_grammar.py::"
_EFFECTS = "test_token_effects.py::"
_GUIDE = "test_guides.py::TestByHand::"
_SEVERAL = "test_guides.py::TestSeveralGrammars::"
_SAMPLES = (
  "test_guides.py::TestJson::test_a_thousand_samples_at_temperature_2_parse"
)

_TABLE = {
  # --- token_bytes -----------------------------------------------------------
  "the last byte of a token is not read": (
    "token_bytes:fold_bytes",
    text("step < length)", "step + 1 < length)"),
    _READS,
  ),
  "long tokens are cut": (
    "token_bytes:fold_bytes",
    text("jnp.any(loop[0] < length)", "jnp.any(loop[0] < 1)"),
    _READS,
  ),
  "a token of -1 is the last one": (
    "token_bytes:fold_bytes",
    given(numbers=lambda g: g.numbers % g.tokens.vocab_size),
    _ADVANCE + "test_a_token_out_of_range_has_no_bytes[-1]",
  ),
  "a state out of range becomes 0": (
    "token_bytes:read_byte",
    text("reads & inside", "reads"),
    _ADVANCE + "test_a_state_out_of_range_stays[7]",
  ),
  "special tokens have bytes": (
    "token_bytes:vocabulary_bytes",
    text("number not in without and", ""),
    _ALPHABET + "test_special_tokens_have_no_bytes",
  ),
  # --- stop_strings ----------------------------------------------------------
  "a string that ends inside a token is missed": (
    "stop_strings:StopStrings.advance",
    text("reads & (found < 0), ended, found", "reads, ended, found"),
    _STOP + "test_a_string_that_ends_inside_a_token",
  ),
  "the string that ends last": (
    "stop_strings:StopStrings.advance",
    text("reads & (found < 0)", "reads & (ended >= 0)"),
    _STOP + "test_the_string_that_ends_first",
  ),
  "strings inside of others are missed": (
    "stop_strings:_first",
    text("max(number, other) if", "number if"),
    _THOUSAND,
  ),
  "the last in the list": (
    "stop_strings:_first",
    text("else min(number, other)", "else max(number, other)"),
    _STOP + "test_of_strings_that_end_together_the_first_in_the_list",
  ),
  "a search begins anew at each byte that does not fit": (
    "stop_strings:_automaton",
    text("shorter[child] = int(table[state, byte])", "shorter[child] = 0"),
    _STOP + "test_a_string_that_begins_again_inside_itself",
  ),
  "all lists begin in the first": (
    "stop_strings:stop_strings",
    text("starts[own] = size", "starts[own] = 0"),
    _LISTS + "test_each_has_its_own_list",
  ),
  "a list is known by its first string": (
    "stop_strings:_as_bytes",
    returned(lambda out, g: out[:1]),
    _THOUSAND,
  ),
  # --- bitmask ---------------------------------------------------------------
  "the first token is the highest bit": (
    "bitmask:_places",
    returned(lambda out, g: jnp.flip(out, axis=-1)),
    _BITS + "TestPackBits::test_token_33_is_bit_1_of_word_1",
  ),
  "what is allowed is masked": (
    "bitmask:mask_logits",
    text(
      "jnp.where(allowed, logits, -jnp.inf)",
      "jnp.where(allowed, -jnp.inf, logits)",
    ),
    _BITS + "TestMaskLogits::test_transformed",
  ),
  # --- grammars --------------------------------------------------------------
  "surrogates are characters": (
    "characters:_strings",
    given(
      high=lambda g: b"\xed\xbf\xbf" if g.high == b"\xed\x9f\xbf" else g.high
    ),
    _CHARACTERS,
  ),
  "bytes after the first are the whole range": (
    "characters:_strings",
    text("low[1:] != least", "False"),
    _CHARACTERS,
  ),
  "a negated set is the set": (
    "regex:_Parser._set",
    text("if negated else ranges", "if not negated else ranges"),
    _REGEX + "test_by_hand[[^a-c]]",
  ),
  "a dot is any character": (
    "regex:_Parser._item",
    text("others([(10, 10)], self._last)", "others([], self._last)"),
    _REGEX + "test_by_hand[.]",
  ),
  "a plus is a star": (
    "regex:_Parser._repeated",
    text(
      "least, most = _SUFFIXES[start]", "least, most = 0, _SUFFIXES[start][1]"
    ),
    _REGEX + "test_by_hand[a*b?c+]",
  ),
  "loops leak into what is before them": (
    "byte_dfa:_Parts._after",
    returned(lambda out, g: g.start),
    _DFA + "TestByHand::test_loops_do_not_leak_into_what_is_around_them",
  ),
  "no separator in a loop": (
    "byte_dfa:_Parts._repeat",
    text("self.add(grammar.separator, self._after(here))", "here"),
    _DFA + "TestByHand::test_separators_stand_between_items",
  ),
  "states that differ late are one": (
    "minimize:_refined",
    returned(lambda out, g: g.origin),
    _DFA + "TestByHand::test_states_that_differ_late_are_two",
  ),
  "states that accept the same are two": (
    "minimize:_refined",
    returned(lambda out, g: jnp.arange(len(out)).__array__()),
    _DFA + "TestByHand::test_equal_ends_are_one",
  ),
  "there is always a longest text": (
    "minimize:longest_accepted",
    text("np.where(done, found, 2**30)", "found"),
    _DFA + "TestLongest::test_bytes[a*-None]",
  ),
  "a number may begin with 0": (
    "json_grammar:_number",
    text('b"123456789"', 'b"0123456789"'),
    _JSON + "TestOptions::test_digits",
  ),
  "strings may hold newlines": (
    "json_grammar:_string",
    text('(ord(" "), 0x7E', '(ord("\\n"), 0x7E'),
    _JSON + "TestOptions::test_characters",
  ),
  "a comma may stand at the end": (
    "json_grammar:_items",
    text("items, literal(end)", "items, optional(comma), literal(end)"),
    _JSON + "TestOptions::test_items",
  ),
  "a level more": (
    "json_grammar:json_grammar",
    given(depth=lambda g: g.depth + 1),
    _JSON + "TestOptions::test_depth",
  ),
  # --- token_effects ---------------------------------------------------------
  "tokens without bytes are allowed": (
    "token_effects:_effects",
    text("np.where(lengths > 0, 0, -1)", "np.where(lengths > 0, 0, 0)"),
    _EFFECTS + "TestByHand::test_tokens_that_stay_alive",
  ),
  "a stop token is text too": (
    "token_effects:token_masks",
    text('b"" if i in stop_tokens else text', "text"),
    _EFFECTS + "TestByHand::test_stop_tokens_are_no_text",
  ),
  "the stop token costs nothing": (
    "token_effects:_distances",
    text("np.where(accepts, 1, FAR)", "np.where(accepts, 0, FAR)"),
    _EFFECTS + "TestByHand::test_the_stop_token_where_a_text_may_end",
  ),
  "ways that no token goes": (
    "token_effects:_distances",
    returned(lambda out, g: out.clip(max=3)),
    _EFFECTS + "TestByHand::test_what_the_tokens_cannot_spell_is_no_way",
  ),
  "a token too many": (
    "token_effects:_masks",
    text("needed[state] <= left", "needed[state] <= left + 1"),
    _SAMPLES,
  ),
  "masks are one token off": (
    "token_effects:_bits",
    text('bitorder="little"', 'bitorder="big"'),
    _EFFECTS + "TestByHand::test_tokens_that_stay_alive",
  ),
  # --- guides ----------------------------------------------------------------
  "a turn goes on where the last one ended": (
    "guides:Guide.process",
    text("rows.counts == 0", "rows.counts < 0"),
    _GUIDE + "test_a_turn_begins_anew",
  ),
  "the last token is read twice": (
    "guides:Guide.process",
    text("self.next, self.tokens, user.state", "self.next, self.tokens, home"),
    _GUIDE + "test_a_text_from_its_first_token_to_its_last",
  ),
  "a limit is a token more": (
    "guides:Guide.process",
    text("user.limit - rows.counts", "user.limit - rows.counts + 1"),
    _SAMPLES,
  ),
  "there is no limit": (
    "guides:Guide.allowed",
    text("jnp.minimum(more, last - first)", "(last - first)"),
    _SAMPLES,
  ),
  "all sequences have the first grammar": (
    "guides:Guide._grammars",
    returned(lambda out, g: out * 0),
    _SEVERAL + "test_each_sequence_has_its_own",
  ),
  "grammars share their masks' rows": (
    "guides:_joined",
    text("own[part.masks.rows]", "part.masks.rows"),
    _SEVERAL + "test_each_sequence_has_its_own",
  ),
  "a turn of any grammar begins in the first": (
    "guides:_joined",
    text(
      "np.repeat(begins + START, sizes)", "np.repeat(begins * 0 + 1, sizes)"
    ),
    _SEVERAL + "test_a_dead_row_finds_its_own_grammar_again",
  ),
}

MUTANTS = {
  name: FailsTest(
    f"jaxkv._src.rollout.automata.{place}",
    wrong,
    f"tests/rollout/automata/{test}",
  )
  for name, (place, wrong, test) in _TABLE.items()
}
