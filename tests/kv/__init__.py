"""Tests of the K/V memory."""
