"""Automata over the bytes of tokens: stop strings and guided decoding.

The host builds an automaton with NumPy and stores it as tables. On the device
each sequence has an int32 state, which advances by the bytes of each drawn
token. So a stop string can begin within one token and end within another, and
a grammar does not depend on how the tokenizer splits a text.
"""
