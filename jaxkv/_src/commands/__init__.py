"""What `python -m jaxkv` can do, a file for each command.

A command has `add_arguments(parser)` and `run(args) -> int`, and raises
`CommandError` for what its user can put right.
"""
