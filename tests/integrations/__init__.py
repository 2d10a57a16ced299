"""Clients of the library, with their real packages; skipped without those."""
