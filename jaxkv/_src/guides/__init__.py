"""Automata over the bytes of tokens: stop strings and guided decoding.

An automaton is built on the host, with NumPy, and becomes tables. On the device
a state is one int32 for each sequence, and a drawn token moves it byte by byte,
so strings and grammars know nothing of where tokens begin and end.

| file              | what it is about                                        |
|-------------------|---------------------------------------------------------|
| `token_bytes`     | the bytes of every token; automata that read them       |
| `stop_strings`    | strings that end a sequence                             |
| `bitmask`         | sets of tokens, a bit each                              |
| `grammars`        | sets of byte strings, put together from smaller ones    |
| `characters`      | characters as bytes of UTF-8                            |
| `regex`           | regular expressions as grammars                         |
| `json_grammar`    | JSON as a grammar                                       |
| `byte_dfa`        | the smallest automaton of a grammar                     |
| `minimize`        | states that accept the same                             |
| `token_effects`   | what every token does to an automaton; how far its end  |
|                   | is, in tokens                                           |
| `guides`          | masks for the next token of every sequence              |
"""
