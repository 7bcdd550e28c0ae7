"""``python -m compiled_fsdp``: the command ``compiled-fsdp``."""

from compiled_fsdp.tools.cli.main import main

if __name__ == "__main__":
    main()
