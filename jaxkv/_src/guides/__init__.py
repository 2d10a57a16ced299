"""Automata over the bytes of tokens: stop strings and guided decoding.

An automaton is built on the host, with NumPy, and becomes tables. On the device
each sequence has a state, an int32, which reads the bytes of each drawn token.
So strings and grammars do not depend on the boundaries of tokens.
"""
