"""Run the command ``compiled-fsdp`` as ``python -m compiled_fsdp``."""

from compiled_fsdp.tools.cli.main import main

if __name__ == "__main__":
    main()
