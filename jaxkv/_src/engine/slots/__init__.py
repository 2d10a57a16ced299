"""The slots: running sequences and their pages."""
