"""The public functions of a cache, a file for each verb or close family."""
