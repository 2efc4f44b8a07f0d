"""Console commands: each module's `main` is a script of pyproject.toml."""
