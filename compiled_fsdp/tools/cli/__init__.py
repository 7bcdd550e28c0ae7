"""The command ``compiled-fsdp``: plans without hardware. Its libraries are those of the extra ``tools``."""
