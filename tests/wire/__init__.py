"""What is gathered instead of parameters: all-gather extensions."""
