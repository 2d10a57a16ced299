"""Automata over the bytes of tokens: stop strings and guided decoding.

An automaton is built on the host, with NumPy, and becomes tables. On the device
a state is one int32 for each sequence, and a drawn token moves it byte by byte,
so strings and grammars know nothing of where tokens begin and end.
"""
