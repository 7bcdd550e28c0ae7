"""What everything else stands on: plain data, texts, files, logs, sizes, errors, and who counts collectives."""
