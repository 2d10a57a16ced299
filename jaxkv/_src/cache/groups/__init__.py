"""Layer groups: their kinds, their sizes in pages, recurrent states."""
