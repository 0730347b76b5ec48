"""The compiled modules, put here by the build; see ``astrai.extension.loader``."""
