"""Text data: read sources, tokenize them into shards, and serve sequences to training. See docs/data.md."""
