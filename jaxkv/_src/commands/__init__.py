"""The commands of `python -m jaxkv`, one module each, and their helpers.

A command has `add_arguments(parser)` and `run(args)`. `run` returns the exit
status and raises `CommandError` for mistakes that the user can correct.
Commands call jaxkv only by its public names.
"""
