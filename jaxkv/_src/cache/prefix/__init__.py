"""The prefix cache: page keys, the index, the rules of publication."""
