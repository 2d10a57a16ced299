"""Automata over the bytes of tokens: stop strings and guided decoding.

The host builds an automaton with NumPy and stores it as tables. On the device
each sequence has a state, an int32, which advances by the bytes of each drawn
token. Because automata read bytes, token boundaries do not matter to strings
and grammars.
"""
