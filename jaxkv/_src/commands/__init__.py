"""The commands of `python -m jaxkv`, one file each.

A command has `add_arguments(parser)` and `run(args) -> int`. It raises
`CommandError` for mistakes that the user can correct. Commands use the public
names of jaxkv, as any other program does.
"""
