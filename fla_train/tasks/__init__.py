"""Synthetic tasks of the papers: state tracking, formal languages, recall. Sequences by seed and index."""
