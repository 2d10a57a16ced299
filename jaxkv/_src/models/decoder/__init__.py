"""One decoder for many families, described layer by layer."""
