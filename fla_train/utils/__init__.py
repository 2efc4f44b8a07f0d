"""Helpers for all packages: files, locks, progress, devices, records. Imports nothing else of fla_train."""
