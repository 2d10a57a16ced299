"""The queue: sequences that wait, run or have ended."""
