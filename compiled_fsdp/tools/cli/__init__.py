"""The command ``compiled-fsdp``. Its libraries are those of the extra ``tools``."""
