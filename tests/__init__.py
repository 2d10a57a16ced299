"""The tests; `python -m tests` runs all checks."""
