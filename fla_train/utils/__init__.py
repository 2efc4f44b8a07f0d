"""Helpers without a domain: files and records. Imports nothing else of fla_train."""
