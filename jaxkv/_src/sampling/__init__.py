"""Sampling: settings, penalties, filters, and the draw of a token."""
