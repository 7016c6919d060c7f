"""Add the addresses of the project to the metadata of a release."""

import os

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Urls(MetadataHookInterface):
    """Derive `[project.urls]` from the repository that the workflow Release builds.

    A build elsewhere has no URLs: the repository may be a fork, or another project that installs
    Veneer from its sources.
    """

    def update(self, metadata):
        """Set `urls` in the metadata."""
        if repository := os.environ.get("VENEER_REPOSITORY"):
            metadata["urls"] = urls(repository)


def urls(repository):
    """Return the URLs of a GitHub repository `owner/name` and of its site."""
    owner, name = repository.split("/")
    source = f"https://github.com/{repository}"
    return {
        "Documentation": f"https://{owner}.github.io/{name}/latest/",
        "Repository": source,
        "Issues": f"{source}/issues",
        "Changelog": f"{source}/blob/main/CHANGELOG.md",
    }
