"""The prefix cache: page keys, the index, lookup and publication."""
