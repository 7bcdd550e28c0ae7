"""Helpers that all other folders import: plain data, texts, files, logs, sizes, errors, counters of collectives."""
