"""Reads one checkpoint whole and says what is wrong with it."""
