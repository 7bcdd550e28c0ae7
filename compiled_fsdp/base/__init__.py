"""Helpers for the other folders: plain data, texts, files, logs, sizes, errors, traffic counters and watchers."""
