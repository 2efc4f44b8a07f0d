"""Provide helpers for all packages: files, locks, progress, devices, records.

They import nothing else of fla_train.
"""
