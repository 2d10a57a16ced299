"""The public verbs of a cache, one file for each verb or family of verbs."""
