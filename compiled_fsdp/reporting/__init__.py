"""The record of each compile, and log lines. Nothing is decided here."""
