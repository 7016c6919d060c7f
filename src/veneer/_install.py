"""The install command that error messages name."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra of this package, which is not on PyPI yet."""
    return f"pip install '.[{extra}]' in a clone of the repository"
