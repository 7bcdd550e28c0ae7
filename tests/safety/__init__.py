"""Nothing that comes from a file or another rank is used before it is checked."""
