"""A decoder for many model families, described layer by layer."""
